"""A real model: SmolLM2-135M-Instruct in float32, from its GGUF file, beside transformers."""

import copy
import functools
import os
from dataclasses import replace

import gguf
import pytest
import torch
import transformers
from helpers.oracles import oracle
from helpers.oracles.dense import assert_same_logits, some_tokens, their_logits
from helpers.targets import slow

import csd
from bench.lib.shapes import SHAPES
from csd.models.demo import smollm2_path
from csd.models.fused.config import ModelConfig
from csd.models.fused.fuse import pack
from csd.models.load import load

# to look at; `make test-long` asks for 10,000
TOKENS = int(os.environ.get("CSD_TOKENS", "320"))


@pytest.fixture(scope="module")
def loaded():
    """An engine, and the module as transformers itself reads the file."""
    folder, name = os.path.split(smollm2_path())
    with pytest.MonkeyPatch.context() as patch:
        # to parse the header twice takes long
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        engine = csd.Engine(smollm2_path(), dtype=torch.float32)
        module = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    return engine, module.eval()


def test_logits(loaded):
    engine, module = loaded
    tokens = some_tokens(21, module.config.vocab_size)
    exact = their_logits(copy.deepcopy(module).double(), tokens)
    assert_same_logits(engine.decoder, tokens, their_logits(module, tokens), 18, exact)


def test_its_shape_is_the_one_we_time(loaded):
    config = ModelConfig.from_transformers(loaded[1].config)
    # the file holds the norm's epsilon in single precision
    assert config.norm_eps == pytest.approx(SHAPES["smollm2-135m"].norm_eps, rel=1e-6)
    assert replace(config, norm_eps=1e-5) == SHAPES["smollm2-135m"]


@pytest.mark.parametrize("texts,total", [(1, 24), pytest.param(8, TOKENS, marks=slow)])
@torch.no_grad()
def test_every_token_follows_its_prefix(loaded, texts, total):
    """Each token csd drew, against transformers' logits for the prefix csd had; a difference is a
    tie.

    So whole samples are plain sampling's, as by drawing them again, but one forward pass over a
    sample gives the logits of all its prefixes.
    """
    engine, module = loaded
    texts = [
        f"Write {n} short sentences about the sea and the people who live by it."
        for n in ("two", "three", "four", "five", "six", "seven", "eight", "nine")[:texts]
    ]
    samples = min(8, max(2, -(-total // 160)))
    vocab, seen, differ = engine.config.vocab, 0, []
    for text in texts:
        prompt = engine.tokenizer(text)["input_ids"]
        key = oracle.key_of(5, prompt)
        out = csd.generate(
            engine,
            prompt,
            num_samples=samples,
            seed=5,
            temperature=0.8,
            max_new_tokens=min(160, total // samples),
            budget=16,
            ignore_eos=True,
        )
        assert out.stats.nodes_accepted > 0
        for sample in out:
            ids = torch.tensor([prompt + sample.tokens])
            logits = module(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            for i, (z, token) in enumerate(zip(logits / 0.8, sample.tokens, strict=True)):
                drawn, gap = oracle.choose(z.double().numpy(), key, i, sample.index, 0)
                seen += 1
                if drawn != token:
                    differ.append((sample.index, i, gap))
                    print(f"sample {sample.index} differs at token {i}, score gap {gap:.2e}")
                    assert gap < 1e-4
            if seen >= total:
                break
        if seen >= total:
            break
    assert vocab == z.shape[0] and seen >= total
    assert len(differ) <= max(1, seen // 10_000)


@pytest.fixture(scope="module")
def exact(loaded):
    """An exact engine of the same weights in bfloat16, packed as a file's are."""
    engine, module = loaded
    rounded = copy.deepcopy(module)
    # not rounded.to(), which would round the rotary frequencies too
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    found = load(rounded, tokenizer=engine.tokenizer)
    pack(found.decoder)
    try:
        return csd.Engine(found, exact=True)
    except ValueError as error:
        # a machine whose products agree nowhere
        pytest.skip(str(error))


@pytest.mark.parametrize("samples,tokens,budget", [(4, 8, 8), pytest.param(1, 50, 24, marks=slow)])
def test_exact_logits_do_not_depend_on_drafts(exact, samples, tokens, budget):
    """Its log-probabilities show other bits long before a token differs."""
    prompt = exact.tokenizer("A baker makes 6 trays of 12 rolls.")["input_ids"]
    asked = dict(num_samples=samples, max_new_tokens=tokens, seed=2, ignore_eos=True)
    drafted = exact.generate(prompt, budget=budget, **asked)
    plain = exact.generate(prompt, speculate=False, **asked)
    assert drafted.stats.nodes_accepted > 0 and drafted.tokens == plain.tokens
    assert drafted.logprobs == plain.logprobs and drafted.raw_logprobs == plain.raw_logprobs


@pytest.mark.skipif("CSD_TOKENS" not in os.environ, reason="long: `make test-long`")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_samples_in_bfloat16(exact, temperature):
    """10,000 tokens with "auto" and without drafts."""
    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "2 + 2 ="]
    prompts = [exact.tokenizer(text)["input_ids"] for text in texts]
    length = 100
    samples = -(-int(os.environ["CSD_TOKENS"]) // (len(prompts) * length))
    asked = dict(max_new_tokens=length, temperature=temperature, seed=5, ignore_eos=True)
    drafted, plain = (
        exact.generate(prompts, num_samples=samples, **asked, **how)
        for how in (dict(budget="auto"), dict(speculate=False))
    )
    assert sum(out.stats.nodes_accepted for out in drafted) > 0
    for out, want in zip(drafted, plain, strict=True):
        assert out.tokens == want.tokens
        assert out.logprobs == want.logprobs and out.raw_logprobs == want.raw_logprobs


@slow
def test_the_module_draws_what_the_fused_decoder_does(loaded):
    engine, module = loaded
    prompt = engine.tokenizer("The capital of France is")["input_ids"]
    own = csd.Engine(module, decoder="module")
    settings = dict(
        num_samples=2,
        seed=3,
        max_new_tokens=min(TOKENS // 20, 40),
        temperature=0.8,
        ignore_eos=True,
    )
    want = engine.generate(prompt, budget=8, **settings).tokens
    for budget in (0, 8):
        assert own.generate(prompt, budget=budget, **settings).tokens == want
