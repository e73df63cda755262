"""A whole generation with every kernel, interpreted or as compiled, against the references."""

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.models import checkpoints
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.targets import few

import csd

pytestmark = pytest.mark.compiled


@few(1)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"temperature": 0.0}),
        (
            "qwen3",
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
        ),
    ],
    ids=["greedy", "filtered"],
)
def test_equals_the_references(few_splits, family, options):
    narrow, wide = (checkpoints.build(family, dtype=d) for d in (torch.float32, torch.float64))
    runs = []
    for model, kernels in ((narrow, "reference"), (narrow, "triton"), (wide, "reference")):
        # kernels of shared rows do not exist, and their drafts would differ
        with csd.Engine(model, max_slots=3, kernels=kernels, share_rows=False) as engine:
            out = engine.generate(
                PROMPTS,
                num_samples=2,
                max_new_tokens=3,
                budget=6,
                seed=3,
                ignore_eos=True,
                **options,
            )
        runs.append(out)
    assert_same_samples(runs[1], runs[0])
    assert_same_samples(runs[2], runs[0])
    for want, got, exact in zip(*runs, strict=True):
        assert got.stats.nodes_proposed == want.stats.nodes_proposed
        assert got.stats.accepted == want.stats.accepted
        found = [torch.tensor(r.logprobs, dtype=torch.float64) for r in (got, want, exact)]
        within_eager(*found, narrow.config.intermediate_size, torch.float32)
    assert sum(sum(out.stats.accepted.values()) for out in runs[0]) > 0
