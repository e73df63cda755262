"""The references of every operation at tiny shapes, right and timed by pytest-benchmark.

`python -m bench.kernels --device cpu` runs this file.
"""

import pytest
import torch

from bench.aot import Shape
from bench.attention_job import JobShape, error_of, limit_for, make
from bench.attention_rivals import FULL_RIVALS, RIVALS
from bench.shapes import SHAPES
from bench.step_jobs import Sizes, makers
from csd.kernels.ops import reference
from csd.kernels.tree_attention import tree_attention_ref

TINY = Shape.of("tiny", SHAPES["tiny"])
SIZES = Sizes(slots=4, groups=2, rows=20, text=40)
CPU = torch.device("cpu")
ATTENTION = JobShape("tiny", 4, 2, 16, samples=3, nodes=5, prompt=70, committed=40)
STEP = makers(reference(), TINY, SIZES, CPU, torch.float32)
STEP_IDS = [" ".join([m.func.__name__, *m.keywords.values()]) for m in STEP]
# eager flex_attention keeps every score: the tests check it, and its time means nothing
PARTS = {name: f for name, f in (RIVALS | FULL_RIVALS).items() if "flex" not in name}


@pytest.mark.parametrize("maker", STEP, ids=STEP_IDS)
def test_step(benchmark, maker):
    job = maker(0)
    job.check()
    benchmark(job.call)


def test_tree_attention(benchmark):
    job = make(ATTENTION, dtype=torch.float32)
    exact = tree_attention_ref(**job.to(torch.float64).arguments)
    out = benchmark(lambda: tree_attention_ref(**job.arguments))
    assert error_of(out, exact) <= limit_for(torch.float32)


@pytest.mark.parametrize("name", PARTS)
def test_tree_attention_of_parts(benchmark, name):
    job = make(ATTENTION, dtype=torch.float32)
    exact = tree_attention_ref(**job.to(torch.float64).arguments)
    call, order = PARTS[name](job)
    assert error_of(order(benchmark(call)), exact) <= limit_for(torch.float32)
