"""Prompts that share a pass on the simulated GPU: bits, and launches."""

import pytest
import torch
from prefill_launches import PRODUCTS, launches
from simulated_gpu import Gpu

import csd
from bench.lib.shapes import random_model
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.step import prefill
from csd.kernels.attention.prompt import PromptChunk

pytestmark = pytest.mark.stand_in

LENGTHS = (10, 90, 40, 70)
# a product of more than 16 rows adds in another order; chunks of 64
ALONE = [[(0, 0, 10)], [(1, 0, 64)], [(1, 64, 90)], [(2, 0, 40)], [(3, 0, 64)], [(3, 64, 70)]]
TOGETHER = [[(0, 0, 10), (1, 0, 64), (2, 0, 40)], [(3, 0, 64), (1, 64, 90)], [(3, 64, 70)]]


def caches(dtype, passes):
    """Keys and values of each prompt as the passes leave them."""
    prompts = [[(7 * i + g) % 90 for i in range(n)] for g, n in enumerate(LENGTHS)]
    params = SamplingParams(max_new_tokens=4)
    asked = [Request.of(g, p, params, range(1), 0) for g, p in enumerate(prompts)]
    with Gpu(by_rows=True):
        run = csd.Engine(random_model("tiny", "cuda", dtype), self_check=False).caches.prepare(
            asked, "consensus"
        )
        run.cache.reset()
        pages = [run.cache.take(run.cache.prompt_pages, g, n) for g, n in enumerate(LENGTHS)]
        for together in passes:
            prefill.read_prompts(run, [PromptChunk(g, prompts[g][a:b], a) for g, a, b in together])
        k, v = (x.cpu() for x in run.cache.parts[0][:2])
    return [
        torch.cat([x[:, pages[g]].flatten(1, 2)[:, :n].flatten() for x in (k, v)])
        for g, n in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_have_the_same_bits_in_every_pass(dtype):
    for got, want in zip(caches(dtype, TOGETHER), caches(dtype, ALONE), strict=True):
        assert torch.equal(got, want) and not got.isnan().any()


def test_products_of_all_rows_would_have_other_bits(monkeypatch):
    want = caches(torch.bfloat16, ALONE)
    monkeypatch.setattr(prefill, "by_chunks", lambda decoder, rows: decoder)
    got = caches(torch.bfloat16, TOGETHER)
    assert not torch.equal(got[0], want[0])


@pytest.mark.parametrize("exact", [False, True])
def test_launches_of_a_prefill(exact):
    """Products of each prompt, or of all where they are exact; a pass launches all else."""
    layers, prompts, tokens = 3, 12, 201
    found = launches(prompts, tokens, layers, exact)
    # two prompts of 200 tokens are a chunk of 512 at most
    passes = prompts // 2
    assert found["_flash_attention_forward"] == layers * passes
    # keys and values go to the pages of all layers at once
    assert found["index_copy_"] == 2 * passes
    assert found["rms_norm_kernel"] == (2 * layers + 1) * passes
    products = sum(found[name] for name in PRODUCTS)
    assert products == 4 * layers * (passes if exact else prompts)
    # two norms, rotary, SwiGLU unless it is in a product, and attention; the rest is of no layer
    others = sum(found.values()) - products - layers * (4 if exact else 5) * passes
    assert others < 20 * passes + 12 * prompts
