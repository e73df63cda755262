"""Texts of samples behind their prompts, wherever csd decodes or encodes one."""

import re
from html import unescape

import pytest
import torch
from helpers.models.checkpoints import build
from helpers.models.text_tokenizers import KINDS, TEXT, tokenizer_of

import csd
from csd.engine.results.result import to_json
from csd.engine.results.stats import Stats
from csd.evaluate.import_logs import traces_of
from csd.models.text.context import TextContext
from csd.models.text.token_bytes import token_bytes

REVERSIBLE = ("byte level", "byte fallback")
CODE = "def f(x):\n", "    return x\n    return x"


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.float64, vocab_size=540)


@pytest.mark.parametrize("bos", [False, True], ids=["without BOS", "with BOS"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_text_join_in_results_callbacks_and_views(model, kind, bos):
    tokenizer = tokenizer_of(kind, bos)
    pieces = {i: "" for i in range(3)}

    def add(_, sample, tokens, text):
        pieces[sample] += text

    out = csd.generate(
        model,
        "Paris is",
        num_samples=3,
        max_new_tokens=24,
        seed=3,
        tokenizer=tokenizer,
        callback=add,
        allowed_token_ids=[*range(5, len(tokenizer))],
        ignore_eos=True,
    )
    before = tokenizer.decode(out.prompt_ids, skip_special_tokens=True)
    for sample in out:
        both = tokenizer.decode(out.prompt_ids + sample.tokens, skip_special_tokens=True)
        assert sample.text
        # the clean-up of spaces may reach over the border
        assert both == before + sample.text or kind == "word piece"
        assert pieces[sample.index] == sample.text
    shown = unescape(re.sub(r"<[^>]+>", "", out._repr_html_()))
    assert all(sample.text in shown for sample in out)


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_pieces_of_a_result_join_to_its_text(kind):
    tokenizer = tokenizer_of(kind)
    prompt, tokens = (tokenizer(f"({TEXT}")["input_ids"][i:j] for i, j in ((0, 2), (2, None)))
    out = csd.Samples([csd.Sample(0, None, tokens, [], [], "stop")], 0, prompt, Stats())
    found = to_json(out, tokenizer, "model", drafts=False)
    (whole,) = found["characters"]
    assert "\ufffd" in found["pieces"].values()
    names = [whole.get(i, found["pieces"][t]) for i, t in enumerate(tokens)]
    assert "".join(names) == TextContext(tokenizer, prompt).text(tokens)


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_a_completion_is_tokenized_behind_its_prompt(model, kind):
    tokenizer = tokenizer_of(kind, bos=True)
    code = CODE if kind == "byte fallback" else ("def f(x):", "\n    return x\n")
    for prompt, completion in (
        code,
        ("Paris is", " a city"),
        ("Paris", "is a city"),
        ("(", "café"),
    ):
        joined = tokenizer(prompt + completion)["input_ids"]
        (sample,) = csd.score(model, prompt, [completion], tokenizer=tokenizer)
        assert tokenizer(prompt)["input_ids"] + sample.tokens == joined
        assert sample.text == completion
        logs = [(1, {"prompt": prompt, "completions": [completion]})]
        (trace,) = traces_of(logs, tokenizer)
        assert trace.samples == [[*sample.tokens, tokenizer.eos_token_id]]


def test_a_completion_that_joins_with_its_prompt_is_refused_with_a_remedy(model):
    tokenizer = tokenizer_of("byte level", bos=True)
    prompt, completion = "The bridge ", "is old"
    for _ in range(3):
        try:
            (sample,) = csd.score(model, prompt, [completion], tokenizer=tokenizer)
        except ValueError as error:
            (end,) = re.fullmatch(
                r"completions must .*: move '(.+)' from the prompt to the beginning of each "
                "completion, or pass token ids",
                str(error),
            ).groups()
            prompt, completion = prompt.removesuffix(end), end + completion
    assert (prompt, completion) == ("The bridge", " is old")
    joined = tokenizer(prompt + completion)["input_ids"]
    assert tokenizer(prompt)["input_ids"] + sample.tokens == joined
    ids = tokenizer("is old", add_special_tokens=False)["input_ids"]
    assert csd.score(model, "The bridge ", [ids], tokenizer=tokenizer)[0].tokens == ids


@pytest.mark.parametrize("kind", REVERSIBLE)
def test_a_bad_word_is_banned_behind_a_space_and_behind_other_characters(model, kind):
    """The tokens after which its last one is banned are those that it has inside texts."""
    tokenizer = tokenizer_of(kind)
    options = dict(num_samples=16, max_new_tokens=8, ignore_eos=True, tokenizer=tokenizer)
    for before in ("The", "The\n", "("):
        for word in ("return", " return"):
            spelled = tokenizer(before + word)["input_ids"]
            *prefix, last = spelled
            # the likeliest token by far is the one that completes the word
            out = csd.generate(
                model, prefix, logit_bias={last: 60.0}, bad_words=["return"], seed=1, **options
            )
            allowed = csd.generate(model, prefix, logit_bias={last: 60.0}, seed=1, **options)
            if tokenizer(before)["input_ids"] == spelled[: len(tokenizer(before)["input_ids"])]:
                assert all(tokens[0] == last for tokens in allowed.tokens)
                assert not any(tokens[0] == last for tokens in out.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_text(kind):
    tokenizer = tokenizer_of(kind)
    of = token_bytes(tokenizer).of
    prompt = tokenizer("a")["input_ids"]
    for line in TEXT.splitlines():
        tokens = tokenizer(f"({line}", add_special_tokens=False)["input_ids"]
        joined = b"".join(of(t) for t in tokens).decode()
        context = TextContext(tokenizer, prompt, skip_special_tokens=False)
        if kind == "word piece":
            # its texts lose the spaces in front of punctuation
            assert joined.replace(" ", "") == context.text(tokens).replace(" ", "")
        else:
            assert joined == context.text(tokens)
    parts = {token_bytes(tokenizer).of(t) for t in range(len(tokenizer))}
    assert kind not in REVERSIBLE or {bytes([b]) for b in range(256)} <= parts
