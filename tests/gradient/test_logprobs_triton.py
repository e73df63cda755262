"""`csd.logprobs` with the kernels of a GPU, interpreted or compiled."""

import checkpoints
import pytest
import torch
from targets import slow

import csd
from csd.models import exact_products as module

pytestmark = pytest.mark.compiled

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_those_of_an_exact_engines_samples(
    dtype, monkeypatch, few_splits, ordered_products
):
    monkeypatch.setattr(module, "GPU_SIZES", (1, 17, 33))
    model = checkpoints.build("llama", dtype=dtype)
    asked = dict(temperature=0.7, top_p=0.95)
    with csd.Engine(model, kernels="triton", exact=True, max_slots=4, static=False) as engine:
        # more tokens than a step's trees are deep
        drawn = engine.generate(
            PROMPT, num_samples=2, max_new_tokens=20, seed=3, ignore_eos=True, budget=8, **asked
        )
        out = csd.logprobs(engine, PROMPT, drawn.tokens, **asked)
    assert not out.exact and "only the logits" in out.why
    # logits of 97 tokens, whose sum the sampler's kernel adds up in another order
    limit = 8 * torch.finfo(torch.float32).eps
    for name in ("logprobs", "raw_logprobs"):
        for x, y in zip(getattr(out, name), getattr(drawn, name), strict=True):
            assert (x - torch.tensor(y)).abs().max() <= limit * max(1, -min(y))
    sum(x.sum() for x in out.logprobs).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
