"""Texts of a server's answers join those of the prompts that were sent."""

import pytest
import torch
from checkpoints import build
from served import call, events, served
from text_tokenizers import tokenizer_of

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

# characters beyond ASCII are single bytes, and the first space of a text is stripped
KIND, PROMPT = "byte fallback", "café is"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(KIND, bos=True)


@pytest.fixture(scope="module")
def port(tokenizer):
    model = build("llama", dtype=torch.float64, vocab_size=len(tokenizer))
    model._csd_tokenizer = tokenizer
    with served(model) as (port, _):
        yield port


def body(tokenizer, **fields):
    """Tokens of characters, of parts of characters, and of spaces."""
    names = ["▁it", "▁", "is", "<0xC3>", "<0xA9>", "<0xF0>", "\n", "n't"]
    allowed = tokenizer.convert_tokens_to_ids(names)
    return {
        "prompt": PROMPT, "max_tokens": 24, "seed": 3, "n": 3, "temperature": 1.4, "logprobs": 1,
        "allowed_token_ids": allowed, "return_token_ids": True, "ignore_eos": True,
    } | fields  # fmt: skip


def joined(tokenizer, choice):
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_echo_returns_what_was_sent_and_offsets_count_the_joined_text(port, tokenizer):
    _, answer = call(port, "/v1/completions", body(tokenizer, echo=True))
    ids = tokenizer(PROMPT)["input_ids"]
    _, by_ids = call(port, "/v1/completions", body(tokenizer, echo=True, prompt=ids))
    for choice, other in zip(answer["choices"], by_ids["choices"], strict=True):
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        assert text == joined(tokenizer, choice) == other["text"] and text.startswith(PROMPT)
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        assert len(offsets) == len(tokens) and offsets == other["logprobs"]["text_offset"]
        for i, offset in enumerate(offsets):
            before = tokenizer.decode(tokens[:i], skip_special_tokens=True)
            if "\ufffd" not in before:
                assert offset == len(before) and text[:offset] == before


def test_an_answer_without_echo_and_its_stream_have_the_same_offsets(port, tokenizer):
    _, answer = call(port, "/v1/completions", body(tokenizer))
    lines = events(port, "/v1/completions", body(tokenizer, stream=True))
    for choice in answer["choices"]:
        assert PROMPT + choice["text"] == joined(tokenizer, choice)
        parts = [c for line in lines for c in line["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        offsets = [x for p in parts if p["logprobs"] for x in p["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


def test_bytes_of_a_chats_tokens_are_the_vocabularys(port, tokenizer):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fields = body(tokenizer, logprobs=True, top_logprobs=2)
    del fields["prompt"]
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": PROMPT}]
    _, answer = call(port, "/v1/chat/completions", fields | {"messages": messages})
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        raw = b"".join(bytes(entry["bytes"]) for entry in entries)
        text = choice["message"]["content"]
        # parts of a character that is not complete have bytes too
        assert raw.decode("utf-8", "ignore") == text.replace("\ufffd", "") or "\ufffd" in text
        assert all(top["bytes"] for entry in entries for top in entry["top_logprobs"])
        names = tokenizer.convert_ids_to_tokens(choice["token_ids"])
        for name, entry in zip(names, entries, strict=True):
            if name.startswith("<0x"):
                assert entry["bytes"] == [int(name[3:5], 16)]
