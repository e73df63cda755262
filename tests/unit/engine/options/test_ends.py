"""End tokens of the generation config and of the tokenizer, and why each sample ended."""

import logging

import pytest
import torch
from helpers.models import checkpoints

import csd

END = 9


class Characters:
    """A tokenizer of one character a token, of which one ends a turn."""

    eos_token_id = END

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) - 33 for c in text]}

    def decode(self, tokens, skip_special_tokens=True):
        shown = [t for t in tokens if t != END] if skip_special_tokens else tokens
        return "".join("<|im_end|>" if t == END else chr(33 + t) for t in shown)


@pytest.fixture(scope="module")
def model():
    yield checkpoints.build("llama", dtype=torch.float64)
    csd.release()


def draw(model, **options):
    options = dict(num_samples=24, max_new_tokens=60, seed=1, tokenizer=Characters()) | options
    return csd.generate(model, [5, 6, 7], **options)


def ends(out) -> set:
    return {s.tokens[-1] for s in out if s.finish_reason == "stop"}


def test_samples_end_at_either_lists_end_tokens(model, caplog):
    from csd.engine.options.params import _log_ends

    _log_ends.cache_clear()
    with caplog.at_level(logging.WARNING, "csd"):
        out = draw(model)
        draw(model)
    assert ends(out) == {*checkpoints.STOP, END}
    assert caplog.text.count("has the end tokens [1, 2] and the tokenizer has [9]") == 1
    for sample in out:
        assert not {*checkpoints.STOP, END} & set(sample.tokens[:-1])
        ended = sample.finish_reason == "stop"
        assert sample.stop_reason == (sample.tokens[-1] if ended else None)
        assert sample.text == Characters().decode(sample.tokens[: -1 if ended else None])


def test_the_ends_that_are_asked_for_replace_both_lists(model):
    assert ends(draw(model, end_token_ids=[20])) == {20}
    assert ends(draw(model, end_token_ids=20, stop_token_ids=[30])) == {20, 30}
    none, ignored = draw(model, end_token_ids=[]), draw(model, ignore_eos=True)
    assert ends(none) == ends(ignored) == set() and none.tokens == ignored.tokens
    with pytest.raises(ValueError, match="end_token_ids must lie in the vocabulary of 97, got 97"):
        draw(model, end_token_ids=[97])


def test_hf_generate_takes_the_generation_config_alone(model):
    ids = model.generate(
        torch.tensor([[5, 6, 7]]),
        do_sample=True,
        top_k=0,
        num_return_sequences=24,
        seed=1,
        max_new_tokens=60,
        custom_generate=csd.hf_generate,
        pad_token_id=0,
    )
    assert any(END in row[3:-1] for row in ids.tolist())


@pytest.mark.parametrize("speculate", [True, False])
def test_a_stop_string_that_is_a_special_token(model, speculate):
    out = draw(model, stop=["<|im_end|>"], end_token_ids=[], speculate=speculate)
    stopped = [s for s in out if s.finish_reason == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.stop_reason == "<|im_end|>"
        assert sample.tokens.index(END) + 1 == len(sample.tokens)
        assert sample.text == Characters().decode(sample.tokens[:-1])
    shown = draw(
        model,
        stop=["<|im_end|>"],
        end_token_ids=[],
        include_stop=True,
        skip_special_tokens=False,
        speculate=speculate,
    )
    assert shown.tokens == out.tokens
    assert all(s.text.endswith("<|im_end|>") for s in shown if s.finish_reason == "stop")


def test_streamed_pieces_join_to_the_text(model):
    pieces: dict[int, str] = {}

    def callback(prompt, sample, tokens, text):
        pieces[sample] = pieces.get(sample, "") + text

    out = draw(model, stop=["!%", "AB", "<|im_end|>C"], callback=callback)
    assert [pieces[s.index] for s in out] == out.texts
