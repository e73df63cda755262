"""Choice of a captured step's pool among a few sizes, on scripted timings."""

import pytest
from simulated_steps import record

from csd.engine.step.budget import AutoPool, FixedPool, StepTimeTable
from csd.engine.step.static_step import sizes_for


def test_pools_have_one_of_a_few_sizes():
    assert sizes_for(3) == [16, 32, 64, 96, 128, 160, 192, 256, 384, 512]
    assert sizes_for(700)[-2:] == [640, 768]
    fixed = FixedPool(20, sizes_for(8))
    assert fixed.pool_shape(8) == (32, 20) and fixed.pool_shape(13) == (64, 20)


@pytest.mark.parametrize(
    ("seconds", "probability", "want"),
    [
        # rows are free up to 64
        ([1, 1, 1, 1.5, 2, 2.5, 3, 4, 6, 8], 0.9, 64),
        # every row costs, and no draft comes true
        ([1, 2, 4, 6, 8, 10, 12, 16, 24, 32], 0.05, 16),
        # nothing costs
        ([1] * 10, 0.9, 512),
    ],
)
def test_the_pool_follows_the_cost(seconds, probability, want):
    cost = StepTimeTable(sizes_for(8), seconds)
    pool, ran = AutoPool(cost, sizes_for(8)), []
    for _ in range(60):
        rows, nodes = pool.pool_shape(8)
        drafted = max(nodes - 8, 0)
        found = record([probability] * drafted, round(probability * drafted), rows=rows)
        found.model_seconds = cost(rows)
        # each slot gets its share
        found.nodes, found.count = [2] * 8, [1 + found.count[0] / 8] * 8
        pool.update(8, found)
        ran.append(rows)
    assert max(set(ran), key=ran.count) == want


def test_the_pool_never_goes_below_the_roots():
    cost = StepTimeTable(sizes_for(100), [1, 2, 4, 6, 8, 10, 12, 16, 24, 32])
    pool = AutoPool(cost, sizes_for(100))
    # nothing pays: the smallest size that holds every root
    assert pool.pool_shape(100)[0] == 128
    for _ in range(30):
        pool.update(100, record([0.05] * 28, 0))
    assert [pool.pool_shape(live)[0] for live in (100, 129, 10)] == [128, 160, 16]
