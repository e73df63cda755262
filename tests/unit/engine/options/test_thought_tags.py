"""Thoughts of samples whose tokens join the tags with the text around them."""

import re

import pytest
import torch
from helpers.models.checkpoints import build
from helpers.models.text_tokenizers import tokenizer_of

import csd
from csd.engine.options.thinking import ThinkingBudget, find_tags, spell_tags, vocabulary

BEGIN, END = "<think>", "</think>"
TAGS = (BEGIN, END)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("joining")


@pytest.fixture(scope="module", params=[False, True], ids=["ragged", "static"])
def engine(request, tokenizer):
    model = build("llama", dtype=torch.float64, vocab_size=len(tokenizer))
    with csd.Engine(model, tokenizer=tokenizer, static=request.param) as e:
        yield e


def parts_of_tags(tokenizer, bias: float) -> dict[int, float]:
    """A bias for the tokens that overlap a tag."""
    tags = spell_tags(TAGS, tokenizer, len(tokenizer))[:2]
    return {token: bias for tag in tags for token in tag.steps}


@pytest.mark.parametrize("budget", [0, 24])
def test_thoughts_are_those_of_the_text_whatever_is_drafted(engine, tokenizer, budget):
    options = dict(
        num_samples=8,
        max_new_tokens=40,
        max_thinking_tokens=12,
        thinking_tags=TAGS,
        seed=4,
        logit_bias=parts_of_tags(tokenizer, 9.0),
        ignore_eos=True,
        temperature=1.5,
    )
    prompt = "So</think>First<think>\n"
    out = csd.generate(engine, prompt, budget=budget, **options)
    assert out.tokens == csd.generate(engine, prompt, speculate=False, **options).tokens
    read = vocabulary(tokenizer, len(tokenizer))
    own_ends = 0
    for sample in out:
        text, spent = prompt.encode(), 0
        for token, forced in zip(sample.tokens, sample.forced, strict=True):
            began, ended = text.rfind(BEGIN.encode()), text.rfind(END.encode())
            inside = began > ended
            assert forced == (inside and spent >= 12)
            spent += inside
            text += read[token]
            own_ends += not forced and inside and END.encode() in text[-len(read[token]) - 7 :]
    assert any(map(any, (s.forced for s in out)))
    assert own_ends


def test_an_end_that_joins_is_the_models_own(engine, tokenizer):
    """`).</`, `think`, `>The`: nothing is forced behind it."""
    ids = [tokenizer.convert_tokens_to_ids(t) for t in (").</", "think", ">The")]
    out = csd.score(engine, "<think>\nFirst (", [ids])
    assert out.texts == [").</think>The"]
    drawn = csd.generate(
        engine,
        "<think>\nFirst ().</think>The",
        max_new_tokens=9,
        max_thinking_tokens=0,
        thinking_tags=TAGS,
        seed=1,
        suppress_tokens=[*parts_of_tags(tokenizer, 0)],
    )
    assert not any(drawn[0].forced)


@pytest.mark.parametrize("opened", [False, True])
def test_a_grammar_begins_where_the_text_does(tokenizer, opened):
    """A token that ends the thought may go on as the grammar allows, and no other one may."""
    pytest.importorskip("llguidance")
    model = build("llama", dtype=torch.float64, vocab_size=len(tokenizer))
    options = dict(
        num_samples=8,
        max_new_tokens=40,
        seed=2,
        regex="(The|a|<)[ab]{1,4}!",
        temperature=1.5,
        max_thinking_tokens=9,
        thinking_tags=TAGS,
        logit_bias=parts_of_tags(tokenizer, 6.0),
    )
    with csd.Engine(model, tokenizer=tokenizer) as e:
        out = e.generate("x<think>" if opened else "x", budget=24, **options)
        plain = e.generate("x<think>" if opened else "x", speculate=False, **options)
    assert out.tokens == plain.tokens
    thoughts = joins = 0
    for sample in out:
        thought, has, text = sample.text.partition(END)
        if not has:
            assert not opened
            thought, text = "", sample.text
        assert re.fullmatch("(The|a|<)[ab]{1,4}!", text), sample.text
        assert opened or not has or thought.startswith(BEGIN)
        thoughts += bool(has)
        names = tokenizer.convert_ids_to_tokens(sample.tokens)
        joins += any(re.search(">(T|a|<)", name) for name in names)
    assert thoughts == 8 if opened else thoughts
    assert joins


def test_the_name_of_a_special_token_is_no_text(tokenizer):
    """`<s>` neither ends a tag with its `>` nor begins one with its `<`."""
    tags = spell_tags(TAGS, tokenizer, len(tokenizer))
    for begin in spell_tags(("<|user|>think", "</s>"), tokenizer, len(tokenizer))[:2]:
        assert begin.text is None
    special = tokenizer.convert_tokens_to_ids("<s>")
    for name, is_open in (("<think", False), ("</think", True)):
        budget = ThinkingBudget(tags, 9, [*tags[0].ids], is_open)
        for token in tokenizer(name, add_special_tokens=False)["input_ids"]:
            budget.push(token)
        budget.push(special)
        budget.push(tokenizer.convert_tokens_to_ids("k"))
        assert budget.open == is_open


def test_tags_of_a_template_that_are_no_tokens():
    """Strings of the chat template are searched for in the text too."""
    own = tokenizer_of.__wrapped__("joining")
    own.chat_template = "{% if true %}<think>{% endif %}</think>"
    assert find_tags(own) == TAGS
    begin, end, close = spell_tags(find_tags(own), own, len(own))
    assert (begin.text, end.text) == (b"<think>", b"</think>")
    assert close == end.ids and len(close) > 1
