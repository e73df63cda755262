"""csd's tokens are plain sampling's, token by token, whatever is drafted."""

from itertools import combinations

import pytest
import torch
from helpers.models.checkpoints import build
from helpers.oracles import oracle
from helpers.targets import few

import csd
from csd.kernels.common.noise import philox_words_ref, prompt_key

pytestmark = pytest.mark.quick

LENGTH = 20
PROMPT = [5, 17, 3, 60, 17, 3, 9]
SETTINGS = {
    "greedy": dict(temperature=0),
    "greedy-penalty": dict(temperature=0, repetition_penalty=1.3),
    "sampled": dict(temperature=1.0),
    "cool": dict(temperature=0.6),
    "top-k": dict(temperature=0.9, top_k=12),
    "top-p": dict(temperature=1.2, top_p=0.8),
    "min-p": dict(temperature=1.1, min_p=0.05),
    "typical": dict(temperature=1.2, typical_p=0.6),
    "typical-of-top-k": dict(temperature=1.4, top_k=25, min_p=0.01, typical_p=0.5),
    "all": dict(
        temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2, min_new_tokens=6
    ),
    "qwen": dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
}
CUTS = dict(top_k=12, top_p=0.8, min_p=0.05, typical_p=0.6, repetition_penalty=1.3)
SETTINGS |= {
    f"{a}-{b}": dict(temperature=1.1) | {a: CUTS[a], b: CUTS[b]} for a, b in combinations(CUTS, 2)
}


def test_philox_known_answers():
    zero = torch.zeros(4, dtype=torch.int64)
    lane = torch.arange(4)
    words = philox_words_ref(zero, lane, zero, zero, 0)
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = torch.full((4,), 0xFFFFFFFF)
    words = philox_words_ref(zero - 1, ones * 4 + lane, ones, ones, 0xFFFFFFFF)
    assert words.tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_the_key_mix_is_fixed():
    assert prompt_key(0, [1, 2, 3]) == 1470200354583225620
    assert prompt_key(-7, [49151]) % 2**64 == oracle.key_of(-7, [49151])


@pytest.fixture(scope="module")
def expected():
    """Plain samples of a family under a setting and seed, drawn once."""
    models, drawn = {}, {}

    def get(family, setting, seed):
        if family not in models:
            # csd rebinds the parameters of its model: the loop has one of its own
            model, twin = build(family, dtype=torch.float64), build(family, dtype=torch.float64)
            twin.generation_config.eos_token_id = None
            models[family] = model, twin, csd.Engine(twin)
        model, _, engine = models[family]
        key = family, setting, seed
        if key not in drawn:
            drawn[key] = [
                oracle.generate(
                    model,
                    PROMPT,
                    seed=seed,
                    sample=i,
                    max_new_tokens=LENGTH,
                    end_ids=(7, 30),
                    **SETTINGS[setting],
                )
                for i in range(5)
            ]
        return engine, drawn[key]

    return get


# a seed of one word and one of two, each with every family and every setting
CASES = [
    (family, setting, (0, 1234567890123)[(i + j) % 2])
    for i, family in enumerate(("llama", "qwen2", "qwen3"))
    for j, setting in enumerate(SETTINGS)
]


@few(5)
@pytest.mark.parametrize(("family", "setting", "seed"), CASES)
def test_tokens_equal_plain_sampling(expected, family, setting, seed):
    engine, plain = expected(family, setting, seed)
    for i, budget in enumerate((0, 4, 16, 64)):
        # each budget with one sample and with many, in one seed's settings or in the other's
        count = (1, 5)[(i + (seed > 0)) % 2]
        out = csd.generate(
            engine,
            PROMPT,
            num_samples=count,
            seed=seed,
            max_new_tokens=LENGTH,
            stop_token_ids=[7, 30],
            budget=budget,
            **SETTINGS[setting],
        )
        for sample, (tokens, logprobs, raw, _) in zip(out, plain, strict=False):
            assert sample.tokens == tokens
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-6)
            assert sample.raw_logprobs == pytest.approx(raw, abs=1e-6)


def test_drafts_are_accepted_in_these_tests(expected):
    """The equality above means something only where drafts are accepted and refused."""
    engine, _ = expected("llama", "cool", 0)
    out = csd.generate(
        engine, PROMPT, num_samples=8, seed=0, max_new_tokens=LENGTH, budget=64, temperature=0.6
    )
    assert 0 < out.stats.nodes_accepted < out.stats.nodes_proposed
