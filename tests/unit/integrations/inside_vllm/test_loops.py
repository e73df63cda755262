"""The backend "cpu" with the numba that vLLM's CPU build pins: tokens are the reference's."""

import pytest

import csd
from csd.models.demo import toy

# not "vllm", which this folder would be where tests/ is on the path
pytest.importorskip("vllm.version", reason="make test-vllm installs it")


def test_loops_draw_the_references_tokens():
    model, _ = toy()
    model = model.double()
    drawn = []
    for kernels in ("cpu", "reference"):
        with csd.Engine(model, kernels=kernels) as engine:
            assert engine.ops.name == kernels
            out = csd.generate(
                engine, [5, 6, 7, 8, 5, 6], num_samples=4, max_new_tokens=16, seed=2, budget=12
            )
            drawn.append([sample.tokens for sample in out.samples])
    assert drawn[0] == drawn[1]
