"""Scores of given tokens: the model's own log-probabilities, and those of sampling."""

import json

import numpy as np
import pytest
import torch
from helpers.models.checkpoints import build
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.targets import few

import csd

PROMPTS = [[5, 17, 3, 60, 17, 3, 9], [4, 4, 8]]
OPTIONS = dict(num_samples=4, max_new_tokens=45, seed=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.float64)


@pytest.fixture(scope="module", params=[dict(), dict(static=True), dict(max_slots=2)], ids=str)
def scorer(request):
    with csd.Engine(build("llama", dtype=torch.float64), **request.param) as engine:
        yield engine


def own(model, prompt, tokens):
    with torch.no_grad():
        probs = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].log_softmax(-1)
    return [float(probs[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens)]


def test_scores_are_the_models_own(model, scorer):
    generator = torch.Generator().manual_seed(0)
    completions = [
        [torch.randint(97, (n,), generator=generator).tolist() for n in lengths]
        for lengths in ((1, 17, 18, 40), (70, 2))
    ]
    out = csd.score(scorer, PROMPTS, completions, entropy=True, prompt_logprobs=True)
    for prompt, given, result in zip(PROMPTS, completions, out, strict=True):
        assert result.tokens == given
        assert result.finish_reasons == ["length"] * len(given)
        for tokens, sample in zip(given, result, strict=True):
            assert sample.raw_logprobs == pytest.approx(own(model, prompt, tokens), abs=1e-9)
            assert sample.logprobs == pytest.approx(sample.raw_logprobs, abs=1e-9)
            assert len(sample.entropies) == len(tokens)
        assert result.prompt_logprobs[1:] == pytest.approx(own(model, prompt[:1], prompt[1:]))
    # of one prompt, not in a list
    one = csd.score(scorer, PROMPTS[1], completions[1])
    for a, b in zip(one, out[1], strict=True):
        assert a.raw_logprobs == pytest.approx(b.raw_logprobs, abs=1e-9)


FILTERED = {
    "plain": dict(),
    "filters": dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    "typical": dict(temperature=1.3, min_p=0.001, typical_p=0.6),
    "greedy": dict(temperature=0),
    "constraints": dict(
        temperature=0.8,
        suppress_tokens=[3],
        no_repeat_ngram_size=2,
        presence_penalty=0.5,
        logit_bias={9: 1.0},
    ),
}


@few(3)
@pytest.mark.parametrize("asked", FILTERED.values(), ids=FILTERED)
def test_scores_of_samples_are_those_they_were_drawn_with(scorer, asked):
    drawn = scorer.generate(PROMPTS, budget=12, **OPTIONS, **asked)
    out = csd.score(scorer, PROMPTS, [r.tokens for r in drawn], **asked)
    for a, b in zip(drawn, out, strict=True):
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x == pytest.approx(y, abs=1e-9)
        for x, y in zip(a.raw_logprobs, b.raw_logprobs, strict=True):
            assert x == pytest.approx(y, abs=1e-9)


@pytest.mark.parametrize(
    "asked",
    [{}, dict(temperature=0.7), dict(temperature=0.9, top_p=0.9), dict(typical_p=0.7)],
    ids=str,
)
def test_an_exact_engine_gives_the_bits_of_sampling(asked):
    with csd.Engine(build("llama", dtype=torch.bfloat16), exact=True) as e:
        drawn = e.generate(PROMPTS, budget=12, **OPTIONS, **asked)
        out = csd.score(e, PROMPTS, [r.tokens for r in drawn], **asked)
        assert [r.raw_logprobs for r in out] == [r.raw_logprobs for r in drawn]
        assert [r.logprobs for r in out] == [r.logprobs for r in drawn]


def test_functions_change_what_follows_a_banned_token(model):
    """No sample comes there, but the tokens are given."""

    def halved(ids, logits):
        return (logits / 2).scatter(1, ids[:, -1:], -torch.inf)

    tokens = [4, 4, 9, 9, 9, 5]
    with csd.Engine(build("llama", dtype=torch.float64)) as e:
        out = csd.score(e, PROMPTS[0], [tokens], logits_processor=halved)
    ids = PROMPTS[0] + tokens
    with torch.no_grad():
        rows = halved(torch.tensor(ids)[:, None], model(torch.tensor([ids])).logits[0])
    logprobs = rows.log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    want = [float(logprobs[i, t]) for i, t in enumerate(tokens)]
    assert want.count(-torch.inf) == 3
    assert out[0].logprobs == pytest.approx(want, abs=1e-9)
    # JSON has no infinity
    made = json.loads(json.dumps(out.to_dict(), allow_nan=False))
    assert made["logprobs"] == [[None if x == -torch.inf else x for x in out[0].logprobs]]


def test_arrays_of_numpy_and_torch(scorer):
    given = np.array([[3, 4, 5], [9, 8, 7]])
    want = csd.score(scorer, PROMPTS[1], given.tolist()).raw_logprobs
    for same in (given, torch.tensor(given), [*given], [[*row] for row in given]):
        assert csd.score(scorer, PROMPTS[1], same).raw_logprobs == want
    out = csd.score(scorer, PROMPTS, given[:, None])
    assert [r.tokens for r in out] == [[[3, 4, 5]], [[9, 8, 7]]]
    assert type(out[0].tokens[0][0]) is int


def test_equal_prompts_and_texts():
    e = engine(PrefixSum(), Letters())
    out = csd.score(e, ["ab", "ab"], [["cd", "e"], ["cde"]])
    assert [r.tokens for r in out] == [[[2, 3], [4]], [[2, 3, 4]]]
    assert out[0].raw_logprobs[0] == out[1].raw_logprobs[0][:2]
    assert out[0].texts == ["cd", "e"]


@pytest.mark.parametrize(
    ("prompt", "completions", "options", "error", "message"),
    [
        ("ab", "cd", {}, ValueError, "completions must be a list of texts or token ids, got 'cd'"),
        ("ab", [], {}, ValueError, "completions must be a list"),
        ("ab", [""], {}, ValueError, "must be lists of at least one token id, got"),
        ("ab", [[99]], {}, ValueError, "completions must lie in the vocabulary of 32"),
        (["ab"], [["a"], ["b"]], {}, ValueError, "completions must be .* for each prompt, 1 in al"),
        ("ab", [[1.5]], {}, ValueError, "completions must be lists of"),
        ("ab", ["c"], dict(seed=1), TypeError, "unknown argument 'seed'; the arguments are"),
        ("ab", ["c"], dict(top_k="a"), TypeError, "top_k must be a whole number"),
        ("ab", [[1] * 5000], {}, ValueError, "exceed the model's context"),
    ],
)
def test_refused_by_name(prompt, completions, options, error, message):
    with pytest.raises(error, match=message):
        csd.score(engine(PrefixSum(), Letters()), prompt, completions, **options)
