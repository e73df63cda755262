"""A prompt's result depends on that prompt alone: not on the others of its call."""

import random

import checkpoints
import pytest
import torch

import csd

CONTEXT = 64


@pytest.fixture(scope="module")
def model():
    yield checkpoints.build("llama", dtype=torch.float64, max_position_embeddings=CONTEXT)
    csd.release()


@pytest.mark.parametrize("seed", range(4))
def test_a_call_of_prompts_equals_calls_of_each(model, seed):
    rng = random.Random(seed)
    lengths = [1, 2, CONTEXT - 1, CONTEXT - 2, CONTEXT, CONTEXT + 9, rng.randint(3, 50)]
    prompts = [[rng.randrange(3, 97) for _ in range(n)] for n in lengths]
    rng.shuffle(prompts)
    options = dict(seed=seed, num_samples=2, temperature=0.9, on_error="return", ignore_eos=True)
    if seed % 2:
        options["max_new_tokens"] = rng.randint(1, 20)
    together = csd.generate(model, prompts, **options)
    for prompt, out in zip(prompts, together, strict=True):
        alone = csd.generate(model, [prompt], **options)[0]
        assert out.tokens == alone.tokens and out.finish_reasons == alone.finish_reasons
        for got, want in zip(out.logprobs, alone.logprobs, strict=True):
            assert got == pytest.approx(want, abs=1e-12)
        assert (out.error is None) == (alone.error is None)
        room = CONTEXT - len(prompt)
        fits = room >= options.get("max_new_tokens", 1)
        assert (out.error is None) == fits
        want = [options.get("max_new_tokens", room)] * 2 if fits else []
        assert [len(s.tokens) for s in out] == want
        assert out.prompt_ids == prompt


def test_copies_of_a_prompt_equal_one_call(model):
    prompts = [[5, 6], list(range(3, 63)), [5, 6]]
    first, _, second = csd.generate(model, prompts, seed=1, num_samples=2)
    both = csd.generate(model, [5, 6], seed=1, num_samples=4)
    assert first.tokens + second.tokens == both.tokens


BAD = {
    "too long": ([5] * CONTEXT, r"prompt 1 has 64 tokens, which leaves no room"),
    "outside of the vocabulary": ([5, 97], "prompt 1 has token id 97"),
    "empty": ([], "prompt 1 must not be empty"),
    "of another type": (7.5, "prompt 1 must be"),
    "a text without a tokenizer": ("abc", "prompt 1 is text"),
}


@pytest.mark.parametrize("prompt, message", BAD.values(), ids=BAD)
def test_a_prompt_that_cannot_be_served_is_named(model, prompt, message):
    prompts = [[5, 6, 7], prompt, [8, 9]]
    with pytest.raises((ValueError, TypeError), match=message):
        csd.generate(model, prompts, seed=2, max_new_tokens=None)
    outs = csd.generate(model, prompts, seed=2, num_samples=3, on_error="return")
    assert [len(out) for out in outs] == [3, 0, 3]
    assert [out.error is None for out in outs] == [True, False, True]
    assert message.replace("\\", "")[:8] in outs[1].error
    alone = csd.generate(model, [8, 9], seed=2, num_samples=3)
    assert outs[2].tokens == alone.tokens


def test_a_call_whose_every_prompt_is_refused_returns(model):
    outs = csd.generate(model, [[97], []], on_error="return")
    assert [len(out) for out in outs] == [0, 0] and all(out.error for out in outs)
    assert csd.generate(model, [97], on_error="return").error


def test_what_is_wrong_with_the_call_is_raised(model):
    with pytest.raises(
        ValueError, match=r"min_new_tokens must be at most max_new_tokens=3, got 9$"
    ):
        csd.generate(model, [[5]], max_new_tokens=3, min_new_tokens=9, on_error="return")
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'return', got 'ignore'"):
        csd.generate(model, [[5]], on_error="ignore")


def test_logits_that_are_not_numbers_end_their_prompt_only():
    model = checkpoints.build("llama", dtype=torch.float64)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    options = dict(num_samples=2, seed=0, max_new_tokens=8, temperature=0, ignore_eos=True)
    alone = csd.generate(model, [5, 6], **options)
    assert 50 not in alone[0].tokens
    with pytest.raises(FloatingPointError, match="prompt 0"):
        csd.generate(model, [[50], [5, 6]], **options)
    bad, good = csd.generate(model, [[50], [5, 6]], **options, on_error="return")
    assert "NaN" in bad.error and bad.finish_reasons == ["cancelled"] * 2
    assert good.tokens == alone.tokens and good.error is None


def test_a_prompt_is_cut_on_the_left(model):
    long = list(range(3, 90))
    cut = csd.generate(model, [long, [5, 6]], seed=4, truncate_prompt=20)
    assert cut[0].prompt_ids == long[-20:]
    assert cut[0].tokens == csd.generate(model, long[-20:], seed=4).tokens
    assert cut[1].tokens == csd.generate(model, [5, 6], seed=4).tokens
    for value in (0, True, "9"):
        with pytest.raises((ValueError, TypeError), match="truncate_prompt must be"):
            csd.generate(model, long, truncate_prompt=value)
