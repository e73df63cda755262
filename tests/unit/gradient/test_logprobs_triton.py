"""`csd.logprobs` and `csd.score` with the kernels of a GPU, interpreted or compiled."""

import pytest
import torch
from helpers.models import checkpoints
from helpers.models.lora_models import adapted
from helpers.targets import slow

import csd
from csd.models import exact_products as module
from csd.models.fused import lora

pytestmark = pytest.mark.compiled

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
SAMPLED = dict(num_samples=2, max_new_tokens=20, seed=3, ignore_eos=True, budget=8)
FILTERS = dict(temperature=0.7, top_p=0.95)
ASKED = {
    "filters": FILTERS,
    "greedy": dict(temperature=0),
    "plain": dict(),
    "top_k, min_p, penalty": dict(top_k=20, min_p=0.01, repetition_penalty=1.3),
    "typical": dict(temperature=1.2, typical_p=0.7),
    "constraints": dict(temperature=0.8, suppress_tokens=[3], frequency_penalty=0.1),
}


@pytest.fixture
def products(monkeypatch, few_splits, ordered_products):
    monkeypatch.setattr(module, "GPU_SIZES", (1, 17, 33))


def compared(model, **asked):
    """Compare the values of a few samples, more tokens than a step's trees are deep."""
    with csd.Engine(model, kernels="triton", exact=True, max_slots=4, static=False) as engine:
        drawn = engine.generate(PROMPT, **SAMPLED, **asked)
        # equal completions, and several tokens behind one prefix
        completions = [*drawn.tokens, drawn.tokens[0], drawn.tokens[0][:3]]
        out = csd.logprobs(engine, PROMPT, completions, **asked)
        scored = csd.score(engine, PROMPT, drawn.tokens, **asked)
    assert out.exact and out.why is None
    for name in ("logprobs", "raw_logprobs"):
        want = getattr(drawn, name)
        values = [x.tolist() for x in getattr(out, name)]
        assert values == [*want, want[0], want[0][:3]]
        assert getattr(scored, name) == want
    return out


@slow
@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        pytest.param(FILTERS, torch.bfloat16, id="bfloat16"),
        *(pytest.param(asked, torch.float32, id=name) for name, asked in ASKED.items()),
    ],
)
def test_values_are_those_of_an_exact_engines_samples(asked, dtype, products):
    model = checkpoints.build("llama", dtype=dtype)
    out = compared(model, **asked)
    sum(x.sum() for x in out.logprobs).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@slow
def test_values_of_adapters_are_those_of_an_exact_engines_samples(products, monkeypatch):
    # as on a GPU; a CPU's loops read another layout
    monkeypatch.setattr(lora, "packed", lambda weight: weight)
    compared(adapted(dtype=torch.float32), **FILTERS)
