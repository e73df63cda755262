"""The cost model and the choice of pool size, on scripted timings."""

from math import log2

import pytest

from csd.budget import AutoBudget, AutoPool, FixedBudget, FixedPool
from csd.cost import CostModel
from csd.pool import COST_ONE
from csd.record import Record
from csd.static_step import sizes_for

FLAT = CostModel([1, 64], [1.0, 1.0])
STEEP = CostModel([1, 2, 64], [1.0, 2.0, 64.0])


def costs(*probabilities):
    return [round(-log2(p) * COST_ONE) for p in probabilities]


def record(probabilities, accepted, draft_seconds=0.0, model_seconds=0.0, rows=None):
    """What the host reads of a step that drafted these nodes, in a pool of `rows`."""
    nodes = 1 + len(probabilities)
    values = dict(
        count=[accepted + 1], nodes=[nodes], costs=costs(*probabilities), rows=rows or nodes,
        draft_seconds=draft_seconds, model_seconds=model_seconds,
    )  # fmt: skip
    return Record(**dict.fromkeys(Record.__dataclass_fields__) | values)


def test_cost_is_linear_between_sizes_and_beyond():
    cost = CostModel([1, 4, 8], [10.0, 10.0, 14.0])
    assert [cost(m) for m in (1, 2, 4, 6, 8, 12)] == [10, 10, 10, 12, 14, 18]


def test_more_rows_never_cost_less():
    assert CostModel([1, 2, 4], [3.0, 2.0, 5.0]).seconds == [3.0, 3.0, 5.0]


def test_measure_runs_every_size_in_turn():
    seen = []
    cost = CostModel.measure(seen.append, [1, 8], repeats=3)
    assert sorted(seen) == [1] * 4 + [8] * 4
    assert len(cost.seconds) == 2


@pytest.mark.parametrize(
    ("cost", "kept"), [(FLAT, 4), (STEEP, 0), (CostModel([1, 64], [10.0, 28.9]), 2)]
)
def test_nodes_are_kept_while_they_pay(cost, kept):
    """At 10 + 0.3 a row, one live slot: 0.9 and 0.4 pay, 0.02 and 0.01 do not."""
    assert AutoBudget(cost).choose(1, costs(0.02, 0.9, 0.01, 0.4)) == kept


def test_drafts_that_keep_failing_count_less():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    for _ in range(60):
        budget.learn(1, record([0.5] * 4, accepted=0))
    assert budget.choose(1, costs(0.4, 0.3)) == 0


def test_time_spent_on_proposing_counts():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    assert budget.choose(1, costs(0.5)) == 1
    for _ in range(60):
        budget.learn(1, record([0.5, 0.5], accepted=1, draft_seconds=9.0))
    assert budget.choose(1, costs(0.5)) == 0


def test_what_every_step_takes_beyond_the_model_makes_nodes_cheaper():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    assert budget.choose(1, costs(0.02)) == 0
    for _ in range(60):
        budget.learn(1, record([], accepted=0, model_seconds=30.0))
    assert budget.choose(1, costs(0.02)) == 1
    # a machine that is faster today says nothing about the slope
    for _ in range(60):
        budget.learn(1, record([], accepted=0, model_seconds=1.0))
    assert budget.choose(1, costs(0.02)) == 0


@pytest.mark.parametrize(
    ("rows", "seconds", "want"),
    [
        # not known
        (16, 0.0, 16),
        # what the cost model says; padding is run too
        (16, 10.0, 16),
        (64, 28.0, 16),
        (16, 14.0, 16),
        (16, 16.0, 64),
        (64, 34.0, 64),
        # a machine that is faster today
        (16, 1.0, 16),
    ],
)
def test_what_every_step_takes_beyond_the_model_makes_pools_cheaper(rows, seconds, want):
    """One live slot: 4 tokens of 16 rows in 10 + o, 8.8 of 64 in 28 + o; equal at o = 5."""
    pool = AutoPool(CostModel([16, 64], [10.0, 28.0]), [16, 64])
    for _ in range(60):
        pool.learn(1, record([0.2] * 15, accepted=3, model_seconds=seconds, rows=rows))
    assert pool.ask(1) == (want, want)


def test_it_rests_where_drafts_do_not_pay_and_looks_again():
    budget = AutoBudget(STEEP)
    asked = []
    for _ in range(80):
        nodes = budget.ask(1)
        asked.append(nodes > 0)
        if nodes:
            budget.keep(budget.choose(1, costs(0.5)))
    looks = [i for i, a in enumerate(asked) if a]
    assert looks[:5] == [0, 3, 8, 17, 34]
    assert asked[34:].count(True) == 3


def test_asking_what_pays_changes_nothing():
    """Growing a tree asks many times a step; only what is kept in the end counts."""
    budget = AutoBudget(STEEP)
    for _ in range(5):
        assert budget.choose(1, costs(0.5)) == 0
    assert budget.ask(1) > 0
    budget.keep(0)
    assert [budget.ask(1) > 0 for _ in range(4)] == [False, False, True, True]


def test_a_step_without_drafts_teaches_nothing():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    for _ in range(60):
        budget.learn(1, record([], accepted=0, draft_seconds=9.0))
    assert budget.choose(1, costs(0.5)) == 1


def test_a_fixed_budget_keeps_everything():
    budget = FixedBudget(12)
    assert budget.ask(5) == 12
    assert budget.choose(5, costs(0.1, 0.01)) == 2


def test_sizes_and_seconds_must_match():
    with pytest.raises(ValueError, match="seconds must be one per size"):
        CostModel([1, 2], [1.0])


def test_pools_have_one_of_a_few_sizes():
    assert sizes_for(3) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert sizes_for(700)[-2:] == [640, 768]
    fixed = FixedPool(20, sizes_for(8))
    assert fixed.ask(8) == (32, 20) and fixed.ask(13) == (64, 20)


@pytest.mark.parametrize(
    ("seconds", "probability", "want"),
    [
        # rows are free up to 64
        ([1, 1, 1, 2, 3, 4, 6, 8], 0.9, 64),
        # every row costs, and no draft comes true
        ([1, 2, 4, 8, 12, 16, 24, 32], 0.05, 16),
        # nothing costs
        ([1, 1, 1, 1, 1, 1, 1, 1], 0.9, 512),
    ],
)
def test_the_pool_follows_the_cost(seconds, probability, want):
    pool = AutoPool(CostModel(sizes_for(8), seconds), sizes_for(8))
    rows = None
    for _ in range(30):
        rows, nodes = pool.ask(8)
        assert rows == nodes
        drafted = rows - 8
        pool.learn(8, record([probability] * drafted, round(probability * drafted)))
    assert rows == want


def test_the_pool_never_goes_below_the_roots():
    pool = AutoPool(CostModel(sizes_for(100), [1, 2, 4, 8, 12, 16, 24, 32]), sizes_for(100))
    # nothing pays: the smallest size that holds every root
    assert pool.ask(100)[0] == 128
    for _ in range(30):
        pool.learn(100, record([0.05] * 28, 0))
    assert [pool.ask(live)[0] for live in (100, 129, 10)] == [128, 192, 16]
