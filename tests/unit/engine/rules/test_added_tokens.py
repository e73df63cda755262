"""Texts of grammars that are also tokens: each is spelled by tokens of texts."""

import copy
import json

import pytest
from helpers.models.families import build
from helpers.models.text_tokenizers import tokenizer_of
from helpers.targets import few
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import csd

pytest.importorskip("llguidance")

ADDED = ("<tool_call>", "</tool_call>", "wide river", "<|im_end|>", "<think>", "</think>", "a<b")
BEGIN, END = "<think>", "</think>"


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "metaspace"])
def made(request):
    # a copy, since tests share it
    tokenizer = copy.deepcopy(tokenizer_of(request.param))
    for text in ADDED:
        special = text == "<|im_end|>"
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)], special)
    if request.param == "metaspace":
        # its vocabulary has the characters of a short text alone
        tokenizer.add_tokens([c for c in '_|x:{}"' if c not in tokenizer.get_vocab()])
    model = build(
        "llama", vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=256
    )
    with csd.Engine(model, tokenizer=tokenizer) as engine:
        yield engine, tokenizer


def escaped(text):
    return "".join(f"[{c}]" if c in "|.*+?()" else c for c in text).replace("/", "\\/")


# constraints under which a text is the only one, and how the text is shown
KINDS = {
    "regex": (lambda x: dict(regex=escaped(x)), str),
    "choice": (lambda x: dict(regex=f"({escaped(x)}|{escaped(x)})"), str),
    "lark string": (lambda x: dict(grammar=f"start: {json.dumps(x)}"), str),
    "lark expression": (lambda x: dict(grammar=f"start: /{escaped(x)}/"), str),
    "constant": (lambda x: dict(json_schema={"const": x}), json.dumps),
    "enumeration": (lambda x: dict(json_schema={"enum": [x]}), json.dumps),
    "pattern": (
        lambda x: dict(json_schema={"type": "string", "pattern": f"^{escaped(x)}$"}),
        json.dumps,
    ),
    "key": (
        lambda x: dict(
            json_schema={
                "type": "object",
                "properties": {x: {"const": 1}},
                "required": [x],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            }
        ),
        lambda x: json.dumps({x: 1}, separators=(",", ":")),
    ),
}
PARTS = st.sampled_from([*ADDED, "x", "tool", "<", ">", "call>", "<|", " is it", "."])
TEXTS = st.tuples(
    st.sampled_from(["", "x", "the "]), st.sampled_from(ADDED), st.lists(PARTS, max_size=3)
).map(lambda x: (x[0] + x[1] + "".join(x[2])).rstrip())


def drawn(engine, text, **more):
    out = engine.generate(
        [5, 6, 7], num_samples=1, seed=0, max_new_tokens=120, progress=False, **more
    )
    assert out.finish_reasons == ["stop"], (text, out.texts)
    return out.texts


@few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_spelled_whatever_tokens_it_also_is(made, kind):
    engine, _ = made
    options, show = KINDS[kind]

    @settings(max_examples=2, deadline=None, database=None)
    @given(TEXTS)
    def check(text):
        assert drawn(engine, text, **options(text)) == [show(text)]

    check()


def test_after_a_thought_and_with_drafts_of_other_texts(made):
    engine, _ = made
    text = "x<tool_call>a</tool_call>"
    thought = dict(max_thinking_tokens=3, thinking_tags=(BEGIN, END))
    for found in drawn(engine, text, regex=escaped(text), **thought):
        assert found.partition(END)[2] in ("", text) and found.endswith(text)
    assert drawn(engine, text, regex=escaped(text), speculate=False) == [text]


def test_a_grammar_names_tokens_in_angles(made):
    engine, tokenizer = made
    out = engine.generate(
        [5, 6, 7],
        num_samples=1,
        seed=0,
        max_new_tokens=20,
        grammar='start: <tool_call> "x" </tool_call> "<tool_call>"',
    )
    ids = tokenizer.get_added_vocab()
    begin, end = (ids[name] for name in ("<tool_call>", "</tool_call>"))
    assert out[0].tokens[0] == begin
    assert out[0].tokens.count(begin) == out[0].tokens.count(end) == 1
    assert out.texts == ["<tool_call>x</tool_call><tool_call>"]
