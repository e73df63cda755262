"""A whole generation with every kernel, interpreted or as compiled, against the references."""

import checkpoints
import pytest
import torch
from engine_cases import PROMPTS, assert_same_samples

import csd


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
    model = checkpoints.build(family)
    runs = []
    for kernels in ("reference", "triton"):
        with csd.Engine(model, max_slots=3, kernels=kernels) as engine:
            out = engine.generate(
                PROMPTS, num_samples=2, max_new_tokens=3, budget=6, seed=3, ignore_eos=True,
                **options,
            )  # fmt: skip
        runs.append(out)
    assert_same_samples(*runs)
    for want, got in zip(*runs, strict=True):
        assert got.stats.nodes_proposed == want.stats.nodes_proposed
        assert got.stats.accepted == want.stats.accepted
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-4)
    assert sum(sum(out.stats.accepted.values()) for out in runs[0]) > 0
