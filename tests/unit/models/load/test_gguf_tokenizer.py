"""Tokens of a text, tokens that end a sample and templates, as a GGUF file has them."""

import importlib.util
import os
from functools import partial

import pytest
import transformers
from helpers.models import checkpoints, gguf_files
from helpers.models.gguf_vocabularies import byte_level, sentencepiece, size
from llama_cpp_model import LlamaCppModel

import csd
from csd.models.load import load
from csd.models.load.gguf.tokenizer import generation_config

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


def written(path, keys):
    vocab = size(keys)
    # as wide as its heads together
    model = checkpoints.build("llama", vocab_size=vocab, hidden_size=64)
    return gguf_files.write(model, path / "tiny.gguf", keys=keys)


# 265 and 266 are the first two special tokens; SentencePiece's own begin with 0, 1, 2
BYTES = partial(byte_level, "<b>", "<e>", bos_token_id="<b>", eos_token_id="<e>")
PIECES = partial(sentencepiece, "<b>", "<e>")
TEXTS = {
    "pre that begins": (BYTES(pre="llama-bpe"), "hello the 123", [265, 264, 258, 220, 260]),
    "begins by pre, not by the flag": (
        BYTES(pre="llama-bpe", add_bos_token=False),
        "hello the",
        [264, 258],
    ),
    "tekken": (BYTES(pre="tekken"), "hello12", [265, 264, 16, 17]),
    "qwen2": (BYTES(pre="qwen2"), "hello12", [264, 16, 17]),
    "qwen2 with the flag": (BYTES(pre="qwen2", add_bos_token=True), "hello", [265, 264]),
    "gpt-2": (BYTES(pre="gpt-2"), "hello123", [264, 260]),
    "digits": (BYTES(pre="smollm"), "hello123 12", [264, 16, 17, 18, 220, 16, 17]),
    "both ends": (
        BYTES(pre="qwen2", add_bos_token=True, add_eos_token=True),
        "hello",
        [265, 264, 266],
    ),
    "the end alone": (
        BYTES(pre="llama-bpe", add_bos_token=False, add_eos_token=True),
        "hello",
        [264, 266],
    ),
    # no merges lead to "hold"
    "whole words": (
        BYTES(pre="llama-bpe", normal=("hold",)),
        "hold",
        [265, 267],
    ),
    "merged words": (BYTES(pre="qwen2", normal=("hold",)), "hold", [71, 78, 75, 67]),
    "special tokens beyond bytes": (
        byte_level(
            "<｜User｜>",
            "<｜end▁of▁sentence｜>",
            pre="deepseek-r1-qwen",
            eos_token_id="<｜end▁of▁sentence｜>",
        ),
        "<｜User｜>hello<｜end▁of▁sentence｜>the",
        [265, 264, 266, 257],
    ),
    "pieces": (PIECES(bos_token_id="<s>"), "hello the", [1, 259, 263, 273, 268, 260]),
    "pieces without ids": (PIECES(), "hello", [1, 259, 263, 273, 268]),
    "pieces without the flag": (PIECES(add_bos_token=False), "hello", [259, 263, 273, 268]),
    "pieces with both ends": (
        PIECES(add_eos_token=True, eos_token_id="<e>"),
        "hello",
        [1, 259, 263, 273, 268, 277],
    ),
    "pieces after spaces": (PIECES(), "  hello", [1, 259, 259, 259, 263, 273, 268]),
    "pieces after a special token": (PIECES(), "<e>hello", [1, 277, 259, 263, 273, 268]),
    "pieces without a space": (PIECES(add_space_prefix=False), "hello", [1, 263, 273, 268]),
}


@pytest.mark.parametrize("keys,text,want", TEXTS.values(), ids=TEXTS)
def test_tokens_of_a_text(tmp_path, keys, text, want):
    tokenizer = load(written(tmp_path, keys)).tokenizer
    assert tokenizer(text)["input_ids"] == want
    assert len(tokenizer) == size(keys)
    if not any(special in text for special in ("<e>", "｜")):
        assert tokenizer.decode(want, skip_special_tokens=True) == text


@needs_llama_cpp
@pytest.mark.parametrize("keys,text,want", TEXTS.values(), ids=TEXTS)
def test_tokens_of_a_text_are_llama_cpps(tmp_path, keys, text, want):
    assert LlamaCppModel(written(tmp_path, keys)).tokens(text) == want


def test_refuse_a_splitter_that_is_not_known(tmp_path):
    path = written(tmp_path, BYTES(pre="deepseek-coder"))
    with pytest.raises(ValueError, match=r"tiny.gguf.*tokenizer.ggml.pre='deepseek-coder'"):
        load(path)
    tokenizer = load(written(tmp_path, BYTES(pre="qwen2"))).tokenizer
    assert load(path, tokenizer=tokenizer).tokenizer is tokenizer


def test_named_templates(tmp_path):
    keys = BYTES(pre="qwen2") | {
        "tokenizer.chat_template": "hello",
        "tokenizer.chat_template.tool_use": "the",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = load(written(tmp_path, keys)).tokenizer
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"
    assert tokenizer.apply_chat_template(chat, tokenize=False, tools=[{}]) == "the"


# ids from 265
ENDS = {
    "end of text": (byte_level("<e>", eos_token_id="<e>", pre="qwen2"), [265]),
    "of a turn": (
        byte_level(
            "<e>",
            "<t>",
            "<m>",
            eos_token_id="<e>",
            eot_token_id="<t>",
            eom_token_id="<m>",
            pre="qwen2",
        ),
        [265, 266, 267],
    ),
    "by their texts": (
        byte_level(
            "<e>",
            "<|im_end|>",
            "<|eom_id|>",
            "<|x|>",
            "<|end|>",
            eos_token_id="<e>",
            pre="llama-bpe",
        ),
        [265, 266, 267, 269],
    ),
    "of another kind": (
        byte_level("<e>", normal=("<|im_end|>", "</s>"), eos_token_id="<e>", pre="qwen2"),
        [265, 266, 267],
    ),
    "parts of a turn": (
        byte_level("<|end|>", "<|return|>", "<|call|>", eos_token_id="<|return|>", pre="qwen2"),
        [266, 267],
    ),
    "filling in": (
        byte_level(
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
            "<|fim_prefix|>",
            "<e>",
            eos_token_id="<e>",
            pre="qwen2",
        ),
        [265, 266, 267, 269],
    ),
    "filling in by id": (
        byte_level(
            "<|fim_pad|>", "<p>", "<e>", eos_token_id="<e>", fim_pad_token_id="<p>", pre="qwen2"
        ),
        [266, 267],
    ),
    "out of the vocabulary": (
        byte_level("<e>", eos_token_id="<e>", eot_token_id=4294967295, pre="qwen2"),
        [265],
    ),
    "pieces": (sentencepiece("<e>", eos_token_id="<e>"), [2, 276]),
    "pieces without ids": (sentencepiece(), [2]),
}


@pytest.mark.parametrize("keys,want", ENDS.values(), ids=ENDS)
def test_end_tokens(tmp_path, keys, want):
    assert load(written(tmp_path, keys)).generation_config.eos_token_id == want


@needs_llama_cpp
@pytest.mark.parametrize("keys,want", ENDS.values(), ids=ENDS)
def test_end_tokens_are_llama_cpps(tmp_path, keys, want):
    assert LlamaCppModel(written(tmp_path, keys)).ends() == want


def test_a_sample_ends_at_the_token_that_ends_a_turn(tmp_path):
    def draw(keys):
        engine = csd.Engine(written(tmp_path, keys))
        return engine.generate("hello", max_new_tokens=16, seed=1, speculate=False).tokens[0]

    whole = draw(BYTES(pre="qwen2"))
    assert len(whole) == 16
    last = whole[9]
    ended = draw(BYTES(pre="qwen2", eot_token_id=last))
    assert ended == whole[: whole.index(last) + 1]


def sampling(**more):
    return generation_config({f"general.sampling.{k}": v for k, v in more.items()}, None)


def test_the_way_to_draw_that_a_file_recommends():
    found = sampling(
        temp=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.05,
        penalty_repeat=1.25,
        penalty_last_n=-1,
        mirostat=0,
        mirostat_tau=5.0,
        xtc_probability=0.0,
        xtc_threshold=0.1,
    )
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 0, 0.9)
    assert (found.min_p, found.repetition_penalty, found.do_sample) == (0.05, 1.25, True)
    assert sampling(penalty_repeat=1.0, penalty_last_n=64).repetition_penalty == 1.0
    assert sampling().temperature == transformers.GenerationConfig().temperature


def test_a_generation_config_beside_a_file_comes_first(tmp_path):
    path = written(tmp_path, BYTES(pre="qwen2"))
    before = load(path).generation_config
    beside = tmp_path / "generation_config.json"
    beside.write_text('{"do_sample": true, "temperature": 0.5, "top_k": 7, "top_p": 0.8}')
    engine = csd.Engine(path)
    found = engine.generation_config
    assert (found.temperature, found.top_k, found.top_p) == (0.5, 7, 0.8)
    # the file has the values that it leaves open
    assert found.eos_token_id == before.eos_token_id != []
    asked = dict(num_samples=2, max_new_tokens=8, seed=1)
    given = dict(temperature=0.5, top_k=7, top_p=0.8)
    assert (
        engine.generate("hello", **asked).tokens
        == engine.generate("hello", **asked, **given).tokens
    )
    assert engine.prepare("hello", seed=0).requests[0].params.top_k == 7
    beside.write_text('{"eos_token_id": [1]}')
    assert load(path).generation_config.eos_token_id == [1]


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"], ids=["cut", "list", "bytes"])
def test_refuse_what_is_no_generation_config_beside_a_file(tmp_path, text):
    path = written(tmp_path, BYTES(pre="qwen2"))
    beside = tmp_path / "generation_config.json"
    beside.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        load(path)
    beside.unlink()
    os.mkfifo(beside)
    with pytest.raises(ValueError, match=r"generation_config\.json must be a regular file"):
        load(path)


@pytest.mark.parametrize(
    "name,value", [("mirostat", 1), ("sequence", "kpt"), ("dry_multiplier", 0.8)], ids=str
)
def test_refuse_a_way_to_draw_that_csd_does_not_have(name, value):
    with pytest.raises(ValueError, match=f"general.sampling.{name}={value!r}"):
        sampling(**{name: value})


def test_refuse_a_penalty_of_the_last_tokens():
    with pytest.raises(ValueError, match=r"general\.sampling\.penalty_last_n=64"):
        sampling(penalty_repeat=1.1, penalty_last_n=64)
