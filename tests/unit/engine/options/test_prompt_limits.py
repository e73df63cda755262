"""A prompt's result depends on that prompt alone: not on the others of its call."""

import random

import pytest
import torch
from helpers.models import checkpoints, scripted
from helpers.models.scripted import PrefixSum
from helpers.targets import slow

import csd

CONTEXT = 64


@pytest.fixture(scope="module")
def model():
    yield checkpoints.build("llama", dtype=torch.float64, max_position_embeddings=CONTEXT)
    csd.release()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=slow) for i in (2, 3))])
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
    asked = dict(seed=2, num_samples=3, max_new_tokens=8)
    outs = csd.generate(model, prompts, on_error="return", **asked)
    assert [len(out) for out in outs] == [3, 0, 3]
    assert [out.error is None for out in outs] == [True, False, True]
    assert message.replace("\\", "")[:8] in outs[1].error
    alone = csd.generate(model, [8, 9], **asked)
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
    assert "NaN" in bad.error and bad.finish_reasons == ["error"] * 2
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


class Holed(PrefixSum):
    """A model whose logits are NaN behind some prefixes, those that make token 7 the likeliest."""

    def logits(self, hidden):
        x = super().logits(hidden)
        return x.masked_fill((x.argmax(-1) == 7)[:, None], torch.nan)


def holed(ids, logits):
    return logits.masked_fill((logits.argmax(-1) == 7)[:, None], torch.nan)


@pytest.mark.parametrize("where", ["the model", "logits_processor or the model"])
def test_nan_ends_a_sample_at_the_same_place_whatever_is_drafted(where):
    """A drafted row beside the path may have NaN; on the path it ends that sample alone."""
    prompt, asked = [5, 6, 5], dict(num_samples=8, seed=3, max_new_tokens=24, temperature=0.7)
    plain = csd.generate(scripted.engine(PrefixSum()), prompt, **asked)
    model, options = Holed(), {}
    if where != "the model":
        model, options = PrefixSum(), dict(logits_processor=holed)
    ends = []
    for tokens in plain.tokens:
        likeliest = [PrefixSum().next_logits(prompt + tokens[:i]).argmax() for i in range(24)]
        ends.append(next((i for i, t in enumerate(likeliest) if t == 7), None))
    assert None in ends and any(ends)
    for budget in (0, 5, 64):
        e = scripted.engine(model)
        out = csd.generate(e, prompt, on_error="return", budget=budget, **asked, **options)
        for sample, tokens, end in zip(out, plain.tokens, ends, strict=True):
            assert sample.tokens == tokens[:end]
            assert sample.finish_reason == ("length" if end is None else "error")
            if end is not None:
                message = f"{where} returned NaN or infinite logits after {end} tokens of sample "
                assert sample.error == f"{message}{sample.index} of prompt 0"
        with pytest.raises(FloatingPointError) as raised:
            csd.generate(e, prompt, budget=budget, **asked, **options)
        assert str(raised.value) == out.error
        assert raised.value.samples.tokens == out.tokens


def test_a_stream_has_the_reason(model):
    prompts = [[5, 6], [5] * CONTEXT, [40]]
    options = dict(num_samples=2, max_new_tokens=4, seed=0, allowed_token_ids=[40, 41, 42, 43])
    options |= dict(no_repeat_ngram_size=1)
    found = {}
    for index, sample in csd.stream(model, prompts, on_error="return", **options):
        found.setdefault(index, {})[sample.index] = sample
    assert [sorted(found[index]) for index in range(3)] == [[0, 1]] * 3
    assert all(s.error is None and s.finish_reason == "length" for s in found[0].values())
    for sample in found[1].values():
        assert sample.finish_reason == "error" and "exceed the model's context" in sample.error
    for sample in found[2].values():
        assert sample.finish_reason == "error" and len(sample.tokens) == 3
        assert "no_repeat_ngram_size banned all tokens after 3 tokens" in sample.error
    # by default it yields the samples that ended, then raises
    good, ended = [prompts[0], prompts[2]], []
    with pytest.raises(ValueError, match="after 3 tokens of sample 0 of prompt 1"):
        for index, sample in csd.stream(model, good, **options):
            ended.append((index, sample.index))
    assert sorted(ended) == [(0, 0), (0, 1)]


def test_until_sees_samples_with_errors_and_cancels_those_behind(model):
    """An error beyond the deciding samples is none of the call's."""
    options = dict(num_samples=4, max_new_tokens=3, seed=0, allowed_token_ids=[40, 41])
    options |= dict(no_repeat_ngram_size=1)
    seen = []

    def enough(prefix):
        seen.append(prefix[-1].finish_reason)
        return len(prefix) == 2

    out = csd.generate(model, [5], until=enough, on_error="return", **options)
    assert seen == ["error"] * 2
    assert out.finish_reasons == ["error"] * 2 + ["cancelled"] * 2
    assert [s.error is None for s in out] == [False, False, True, True]
