"""Texts, offsets and bytes of an answer, which join those of the prompts that were sent."""

from types import SimpleNamespace

import pytest
from helpers.models.text_tokenizers import tokenizer_of

pytest.importorskip("starlette")
from csd.serve.http.api.request import Asked
from csd.serve.http.api.response import HttpAnswer, Offsets, TokenTexts

# characters beyond ASCII are single bytes, and the first space of a text is stripped
KIND, PROMPT = "byte fallback", "café is"
NAMES = ["▁", "it", "▁", "<0xC3>", "<0xA9>", "\n", "<0xF0>", "<0x9F>", "n't"]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(KIND, bos=True)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return tokenizer.convert_tokens_to_ids(NAMES)


def answer_to(tokenizer, prompt, scores=None, **options):
    """An answer and its handle; scores: of the prompt's tokens."""
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    handle = SimpleNamespace(prompt_ids=ids, scores=scores)
    asked = Asked(False, [prompt], options, top=0, echo=scores is not None, handles=[handle])
    return HttpAnswer(asked, "model", TokenTexts(tokenizer)), handle


@pytest.mark.parametrize("by_ids", [False, True])
def test_echo_returns_what_was_sent_and_offsets_count_the_joined_text(tokenizer, tokens, by_ids):
    ids = tokenizer(PROMPT)["input_ids"]
    scores = SimpleNamespace(logprobs=[-1.0] * (len(ids) - 1), top=[[]] * (len(ids) - 1))
    answer, handle = answer_to(tokenizer, ids if by_ids else PROMPT, scores)
    assert answer.echo(handle) == PROMPT
    found = answer.logprobs(
        tokens, [-1.0] * len(tokens), [[]] * len(tokens), Offsets(answer, handle), handle
    )
    offsets, every = found["text_offset"], ids + tokens
    assert len(offsets) == len(every)
    certain = 0
    for i, offset in enumerate(offsets):
        before = tokenizer.decode(every[:i], skip_special_tokens=True)
        if "\ufffd" not in before:
            certain += 1
            assert offset == len(before)
    assert certain >= len(ids) + 5


def test_offsets_of_parts_are_those_of_the_whole(tokenizer, tokens):
    answer, handle = answer_to(tokenizer, PROMPT)
    parts = Offsets(answer, handle)
    whole = Offsets(answer, handle).of(tokens)
    assert parts.of(tokens[:4]) + parts.of([]) + parts.of(tokens[4:]) == whole
    assert whole[:4] == [0, 1, 3, 4] and whole[4] == 4


def test_a_text_that_the_tokenizer_would_change_is_echoed_as_it_was_sent():
    lower = tokenizer_of("word piece", bos=True)
    answer, handle = answer_to(lower, "The  River.")
    assert answer.echo(handle) == "The  River."
    answer, handle = answer_to(lower, [1, *lower("The river.")["input_ids"]])
    assert answer.echo(handle) == "the river."


def test_bytes_of_tokens_are_the_vocabularys(tokenizer, tokens):
    answer, _ = answer_to(tokenizer, PROMPT)
    tops = [[(t, -1.0)] for t in tokens]
    content = answer.chat_logprobs(tokens, [-1.0] * len(tokens), tops)["content"]
    want = [b" ", b"it", b" ", b"\xc3", b"\xa9", b"\n", b"\xf0", b"\x9f", b"n't"]
    assert [bytes(entry["bytes"]) for entry in content] == want
    assert [bytes(entry["top_logprobs"][0]["bytes"]) for entry in content] == want
