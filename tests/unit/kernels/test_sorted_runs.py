"""Sorted lists and their runs, as the references in numpy use them."""

import random

import numpy as np
import pytest

from csd.kernels.common.sorted_runs import rank_in_run, stable_order, starts

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("bits", [1, 31, 52, 53, 57, 62, 63])
def test_order_is_pythons(size, bits):
    # the last two are too long to share a word with a place
    rng = random.Random(size * bits)
    values = [(1 << bits) - 1, *(rng.getrandbits(bits) for _ in range(rng.randrange(1, 30)))]
    key = [rng.choice(values) for _ in range(size)]
    order = stable_order(np.array(key, np.int64), 1 << bits)
    assert order.tolist() == sorted(range(size), key=key.__getitem__)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [([], []), ([4], [0]), ([4, 4, 4], [0, 1, 2]), ([1, 2, 2, 1, 1, 0], [0, 0, 1, 0, 1, 0])],
    ids=["empty", "one", "equal", "runs"],
)
def test_runs_are_ranked(values, ranks):
    first = starts(np.array(values, np.int64))
    assert first.tolist() == [rank == 0 for rank in ranks]
    assert rank_in_run(first).tolist() == ranks
