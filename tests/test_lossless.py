"""csd's tokens are plain sampling's, token by token, whatever is drafted."""

import os

import oracle
import pytest
import torch
from checkpoints import build

import csd
from csd.kernels.noise import philox_words_ref, prompt_key

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
    "all": dict(
        temperature=0.8, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2, min_new_tokens=6
    ),
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
                    model, PROMPT, seed=seed, sample=i, max_new_tokens=LENGTH, end_ids=(7, 30),
                    **SETTINGS[setting],
                )
                for i in range(8)
            ]  # fmt: skip
        return engine, drawn[key]

    return get


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", [0, 1234567890123])
def test_tokens_equal_plain_sampling(expected, family, setting, seed):
    engine, plain = expected(family, setting, seed)
    for budget in (0, 4, 16, 64):
        for count in (1, 3, 8):
            out = csd.generate(
                engine, PROMPT, num_samples=count, seed=seed, max_new_tokens=LENGTH,
                stop_token_ids=[7, 30], budget=budget, **SETTINGS[setting],
            )  # fmt: skip
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


def test_smollm2_in_float32(smollm2, smollm2_module):
    """Against plain sampling with transformers, in float32: a difference is a tie."""
    prompt = smollm2.tokenizer("The capital of France is")["input_ids"]
    out = csd.generate(
        smollm2, prompt, num_samples=2, seed=3, max_new_tokens=40, temperature=0.8, budget=8,
        ignore_eos=True,
    )  # fmt: skip
    for sample in out:
        tokens, _, _, gaps = oracle.generate(
            smollm2_module, prompt, seed=3, sample=sample.index, max_new_tokens=40, temperature=0.8
        )
        same = [a == b for a, b in zip(sample.tokens, tokens, strict=True)]
        if not all(same):
            at = same.index(False)
            print(f"sample {sample.index} differs at token {at}, score gap {gaps[at]:.2e}")
            assert gaps[at] < 1e-4


@torch.no_grad()
def test_every_smollm2_token_follows_its_prefix(smollm2, smollm2_module):
    """Each token csd drew, against transformers' logits for the prefix csd had; CSD_TOKENS of them.

    One forward pass over a whole sample gives the logits of all its prefixes.
    """
    wanted = int(os.environ.get("CSD_TOKENS", "320"))
    texts = [f"Write {n} short sentences about the sea and the people who live by it." for n in
             ("two", "three", "four", "five", "six", "seven", "eight", "nine")]  # fmt: skip
    vocab, seen, differ = smollm2.config.vocab, 0, []
    for text in texts:
        prompt = smollm2.tokenizer(text)["input_ids"]
        key = oracle.key_of(5, prompt)
        out = csd.generate(
            smollm2, prompt, num_samples=min(8, -(-wanted // 160)), seed=5, temperature=0.8,
            max_new_tokens=160, budget=16, ignore_eos=True,
        )  # fmt: skip
        assert out.stats.nodes_accepted > 0
        for sample in out:
            ids = torch.tensor([prompt + sample.tokens])
            logits = smollm2_module(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            for i, (z, token) in enumerate(zip(logits / 0.8, sample.tokens, strict=True)):
                drawn, gap = oracle.choose(z.double().numpy(), key, i, sample.index, 0)
                seen += 1
                if drawn != token:
                    differ.append((sample.index, i, gap))
                    print(f"sample {sample.index} differs at token {i}, score gap {gap:.2e}")
                    assert gap < 1e-4
            if seen >= wanted:
                break
        if seen >= wanted:
            break
    assert vocab == z.shape[0] and seen >= wanted
    assert len(differ) <= max(1, seen // 10_000)
