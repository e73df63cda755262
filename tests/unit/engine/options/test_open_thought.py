"""Thoughts that a prompt leaves open: by its very end, or by the answer that it begins."""

import copy
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers.models.scripted import LastToken, engine
from hypothesis import given
from hypothesis import strategies as st

import csd
from csd.engine.options.open_thought import Front, answer_header, leaves_thought_open, open_thoughts
from csd.engine.options.thinking import PAIRS, ThinkingBudget, spell_tags
from csd.evaluate import evaluation as evaluate
from csd.evaluate.problems.tasks import TASKS, Problem
from csd.models.demo import toy
from csd.models.text.prompts import parse
from csd.models.text.streamed import SampleText

MODEL, TOKENIZER = toy()
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}END{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
    "{% elif m.role == 'system' %}{{ '<<SYS>>' + m.content + '<</SYS>>' }}"
    "{% else %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
# what each writes in front of an answer
TEMPLATES = {
    "chatml": (CHATML.replace("END", ""), False),
    "qwen3-thinking": (CHATML.replace("END", "{{ '<think>\n' }}"), True),
    "qwen3-without": (CHATML.replace("END", "{{ '<think>\n\n</think>\n\n' }}"), False),
    "begins-the-thought": (CHATML.replace("END", "{{ '<think>\nOkay, ' }}"), True),
    "magistral": (INST, False),
    "llama-3": (
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
        "(m.content | trim) + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        False,
    ),
    "gemma": (
        "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else "
        "m.role) + '\n' + (m.content | trim) + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        False,
    ),
    "vicuna": (
        "{% for m in messages %}{{ {'system': '', 'user': 'USER: ', 'assistant': 'ASSISTANT: '}"
        "[m.role] + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        False,
    ),
    "deepseek": (
        "{% for m in messages %}{{ {'system': '', 'user': '<|User|>', 'assistant': "
        "'<|Assistant|>'}[m.role] + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}",
        True,
    ),
    "toy": (TOKENIZER.chat_template, False),
}


def tokenizer_with(template):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return {name: tokenizer_with(template) for name, (template, _) in TEMPLATES.items()}


def is_open(messages, tokenizer, **options):
    """State that votes and budgets read of a prompt's token ids, by templates' tags and by one."""
    (ids,), _ = parse(messages, tokenizer, len(tokenizer), None, options)
    return open_thoughts(ids, 0, tags_of(tokenizer), tokenizer)


@cache
def tags_of(tokenizer):
    return spell_tags(("<think>", "</think>"), tokenizer, len(tokenizer))


words = st.sampled_from(["", " ", "\n", "What is ", " for?", "a", "assistant", "ASSISTANT: x "])
mentions = st.sampled_from([tag for pair in PAIRS for tag in pair])
told = st.lists(words | mentions, min_size=1, max_size=5).map("".join).filter(str.strip)


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_words_of_messages_open_no_thought(tokenizers, name, data):
    """The template alone decides, whatever a message or an earlier answer has."""
    tokenizer, (_, opens) = tokenizers[name], TEMPLATES[name]
    messages = [{"role": "user", "content": data.draw(told)}]
    if data.draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": data.draw(told)})
    if data.draw(st.booleans()):
        earlier = [{"role": role, "content": data.draw(told)} for role in ("assistant", "user")]
        messages += earlier
    assert is_open(messages, tokenizer) == (opens, opens)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("begun", "opens"),
    [
        ("<think>\nLet me see", True),
        ("<think>\nLet me see. A </thinking> is no end", True),
        ("<think>Hm.</think> It is", False),
        ("<think>Hm.</think> <think> is a tag", False),
        ("The tag <think> is", False),
        ("It is", False),
    ],
)
def test_an_answer_that_is_continued(tokenizers, name, begun, opens):
    messages = [
        {"role": "user", "content": "What is </think>, or <think>?"},
        {"role": "assistant", "content": begun},
    ]
    found = is_open(messages, tokenizers[name], continue_final_message=True)
    assert found == (opens, opens)


@pytest.mark.parametrize("name", TEMPLATES)
def test_token_ids_and_texts_of_a_conversation(tokenizers, name):
    """The header is found in a prompt that a caller rendered, with the begin of an answer."""
    tokenizer = tokenizers[name]
    asked = [{"role": "user", "content": "Why <think>?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert answer_header(tokenizer) and answer_header(tokenizer) in text
    text = text.partition("<think>\n")[0]
    for begun, opens in (("<think>\nLet me", True), ("<think>a</think>b", False), ("A", False)):
        assert open_thoughts(tokenizer(text + begun).input_ids, 0, None, tokenizer)[0] == opens


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("How many letters has <reason>?\nA:", False),
        ("<think> is a tag. Why?", False),
        ("Question: 2?\n<think>\n", True),
        ("[THINK]", True),
        ("<think></think>", False),
        ("", False),
    ],
)
def test_a_text_without_turns_opens_one_at_its_very_end(prompt, opens):
    assert leaves_thought_open(prompt) == opens
    assert leaves_thought_open(prompt, "<|assistant|>") == opens
    assert not leaves_thought_open(prompt, pairs=())


def test_later_turns_of_an_answer():
    for prompt, answered, opens in [
        ("2?", "<think>Hm, let me call", True),
        ("2?", "<think>Hm.</think>So", False),
        ("2?", "So <think> is", False),
        ("2?<think>", "Hm", True),
        ("2?<think>", "Hm.</think> So", False),
        ("Why <think>?", "So", False),
    ]:
        assert leaves_thought_open(prompt, answered=answered) == opens
        # the header of a later turn begins another answer
        later = f"{answered}<|end|>Why <think>?<|assistant|>"
        assert not leaves_thought_open(prompt, "<|assistant|>", answered=later)


def test_a_session_goes_on_in_the_thought_that_it_began():
    ids = {text: TOKENIZER(text).input_ids for text in ("Why <think>?", "<think>Hm")}
    with csd.Engine(MODEL, tokenizer=TOKENIZER) as e:
        session = e.session(ids["Why <think>?"], num_samples=2, seed=0)
        session[0].append(ids["<think>Hm"])
        session[1].append("Hm")
        samples = session.sample(max_new_tokens=2)
    assert [sample.in_thought for sample in samples] == [True, False]


def test_token_ids_without_a_tokenizer():
    tags = ((1, 2), (3,), (3,))
    assert open_thoughts([5, 1, 2], 0, tags, None) == (False, True)
    assert open_thoughts([1, 2, 5], 0, tags, None) == (False, False)
    assert open_thoughts([1, 2], 0, None, None) == (False, False)
    # neither has a template that fails, nor one that does not show a message
    for template in ("{{ raise_exception('no') }}", "{{ messages | length }}"):
        assert answer_header(tokenizer_with(template)) == ""
    odd = SimpleNamespace(chat_template=None, decode=TOKENIZER.decode, __hash__=None)
    assert answer_header(odd) == ""


def test_a_tag_that_the_prompt_begins_ends_in_the_sample():
    budget = ThinkingBudget(((1,), (2, 3), (2, 3)), 0, [1, 5, 2], True)
    assert budget.forced() == 3
    budget.push(3)
    assert not budget.open


ASK = "Answer with one number. What is {}?"


@pytest.mark.parametrize("grammar", [False, True])
def test_samples_do_not_depend_on_a_mention(grammar):
    """A budget forces nothing, a grammar applies from the first token, and the answer is read."""
    options = dict(num_samples=4, max_new_tokens=12, seed=1, max_thinking_tokens=0)
    options |= dict(thinking_tags=("<think>", "</think>"))
    if grammar:
        pytest.importorskip("llguidance")
        # a sample may begin a thought of its own
        options |= dict(regex="The answer is [0-9]!", suppress_tokens=TOKENIZER("<").input_ids)
    with csd.Engine(MODEL, tokenizer=TOKENIZER) as e:
        for word in ("<think>", "a <think> b", "</think><think>"):
            asked = [{"role": "user", "content": ASK.format(word)}]
            out = e.generate(asked, **options)
            assert not any(sample.in_thought for sample in out)
            if grammar:
                assert all("The answer is".startswith(text) for text in out.texts)
                whole = e.generate(asked, **options | dict(max_new_tokens=20))
                assert all(re.fullmatch("The answer is [0-9]!", text) for text in whole.texts)
                assert csd.vote(whole).answer is not None
            else:
                assert not any(map(any, (sample.forced for sample in out)))
        opened = e.generate(f"{ASK}<think>\n", **options)
        assert all(sample.forced[0] and sample.in_thought for sample in opened)


def test_a_page_reads_the_same_state():
    from csd.evaluate.report.data import check, decision

    with csd.Engine(MODEL, tokenizer=TOKENIZER) as e:
        for asked, opens in ((ASK.format("<think>"), False), ("1?<think>\n", True)):
            prompt = asked if opens else [{"role": "user", "content": asked}]
            out = e.generate(prompt, num_samples=2, max_new_tokens=4, seed=0, regex="[0-9]{3}")
            result = csd.engine.results.result.to_json(out, TOKENIZER, "toy", False)
            result["pieces"] = {str(i): text for i, text in result["pieces"].items()}
            check(result)
            assert (decision(result).answer is None) == opens == result["in_thought"]


def stopped_at(text, stop, opened):
    """Place of the first stop string behind a thought in front of a whole text, or None."""
    start = 0
    begin = next((pair for pair in PAIRS if text.lstrip().startswith(pair[0])), None)
    if begin is not None or opened:
        ends = [end for _, end in PAIRS] if opened else [begin[1]]
        places = [at + len(end) for end in ends if (at := text.find(end)) >= 0]
        if not places:
            return None
        start = min(places)
    at = text.find(stop, start)
    return at if at >= 0 else None


@given(data=st.data())
def test_stop_strings_behind_a_thought(data):
    parts = ["<think>", "</think>", "</thinking>", "Question:", "Quest", "<", "th", "a", " ", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=8))) + "."
    stop = data.draw(st.sampled_from(["Question:", "<", "a", "k>"]))
    opened = data.draw(st.booleans())
    reader = SampleText(
        TOKENIZER,
        (stop,),
        include_stop=False,
        skip_special_tokens=True,
        streams=True,
        answer=Front(PAIRS, opened).answer,
    )
    ended, taken = False, ""
    for token in TOKENIZER(text).input_ids:
        ended = reader.push(token)
        if ended:
            break
        taken += reader.take()
    at = stopped_at(text, stop, opened)
    assert ended == (at is not None)
    whole, rest = reader.finish(by_token=False)
    assert whole == taken + rest == text[:at]


def writer(text):
    """An engine whose samples are a text, whatever the prompt is."""
    end = TOKENIZER.eos_token_id
    follows = [*TOKENIZER(text).input_ids, end]

    def logits_of(token, position):
        logits = torch.full((token.shape[0], len(TOKENIZER)), -50.0, dtype=torch.float64)
        after = [min(max(p - PROMPT + 1, 0), len(follows) - 1) for p in position.tolist()]
        logits[torch.arange(len(after)), [follows[i] for i in after]] = 50.0
        return logits

    return engine(LastToken(logits_of, len(TOKENIZER)), tokenizer=TOKENIZER)


PROMPT = len("Question: What is 2 + 3?\nAnswer:")


@pytest.mark.parametrize(
    ("text", "drawn", "answer"),
    [
        ("<think>Look Question: two plus three.</think> #### 5 Question: 6?", 53, "5"),
        ("<think>Look Question: two plus three.", 37, None),
        ("#### 5 Question: <think>", 7, "5"),
        ("So <think> Question: 6?", 11, None),
    ],
)
def test_evaluations_stop_behind_thoughts(tmp_path, text, drawn, answer):
    problem = Problem(0, "Question: What is 2 + 3?\nAnswer:", "5")
    results = evaluate.Results(tmp_path / "r.jsonl", {})
    options = dict(num_samples=2, chat=False, seed=0, temperature=0.0, max_new_tokens=80)
    ((row,),) = evaluate.run(
        writer(text), [problem], TASKS["gsm8k"], results, stop=["Question:"], **options
    )
    assert row["texts"] == [text[:drawn]] * 2 and row["answers"] == [answer] * 2
