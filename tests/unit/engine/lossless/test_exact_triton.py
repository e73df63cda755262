"""`exact=True` with the kernels of a GPU, interpreted or compiled: the same bits in every run."""

import os

import pytest
import torch
from helpers.models import checkpoints
from helpers.runs.exact_runs import assert_same_bits, run
from helpers.targets import slow

import csd
from csd.models import exact_products as module

pytestmark = pytest.mark.compiled

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch, few_splits, ordered_products):
    """A number of rows on each side of a tile is enough to find that all agree."""
    monkeypatch.setattr(module, "GPU_SIZES", (1, 17, 33))


def samples(model, exact, count, slots=4, static=False, **options):
    with csd.Engine(model, max_slots=slots, kernels="triton", exact=exact, static=static) as engine:
        return run(
            engine,
            [PROMPT],
            count,
            max_new_tokens=5,
            seed=3,
            temperature=0.7,
            top_p=0.95,
            ignore_eos=True,
            **options,
        )


LONG = pytest.mark.skipif("CSD_TOKENS" not in os.environ, reason="long: `make test-long`")


@slow
@pytest.mark.parametrize(
    ("family", "dtype", "exact", "static"),
    [
        ("llama", torch.bfloat16, True, True),
        pytest.param("qwen3", torch.float16, True, False, marks=LONG),
        pytest.param("qwen2", torch.float32, "cublas", False, marks=LONG),
    ],
    ids=str,
)
def test_a_run_with_drafts_has_the_bits_of_one_without(family, dtype, exact, static):
    model = checkpoints.build(family, dtype=dtype)
    plain = samples(model, exact, 3, speculate=False)
    # 17 rows and more are another tile than one
    drafted = samples(model, exact, 2, static=static, budget=24)
    assert sum(out.stats.nodes_accepted for out in drafted[0]) > 0
    assert_same_bits(drafted, plain)
