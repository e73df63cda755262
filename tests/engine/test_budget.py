"""How many nodes a step asks for and keeps, on scripted timings."""

import math
import random

import pytest
from simulated_steps import costs, flat, record, steep

from csd.engine.budget import BEHIND, AutoBudget, FixedBudget, most_nodes, progress
from csd.engine.step_cost import CostModel
from csd.engine.time_steps import sizes_to_time
from csd.state.pool import COST_ONE, PACE


def test_a_fixed_budget_keeps_everything():
    budget = FixedBudget(12)
    assert budget.ask(5) == 12
    assert budget.choose(5, costs(0.1, 0.01)) == 2


@pytest.mark.parametrize(
    ("cost", "kept"), [(flat(), 4), (steep(), 0), (CostModel([1, 64], [10.0, 28.9]), 2)]
)
def test_nodes_are_kept_while_they_pay(cost, kept):
    """At 10 + 0.3 a row, one live slot: 0.9 and 0.4 pay, 0.02 and 0.01 do not."""
    assert AutoBudget(cost).choose(1, costs(0.02, 0.9, 0.01, 0.4)) == kept


def test_drafts_that_keep_failing_count_less():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    for _ in range(60):
        budget.learn(1, record([0.5] * 4, accepted=0))
    assert budget.choose(1, costs(0.4, 0.3)) == 0


def see(budget, steps, plain, drafted, nodes, accepted=0):
    """Steps over one slot, with drafts and without, of so many seconds."""
    for i in range(steps):
        budget.learn(1, record([], 0, model_seconds=plain))
        budget.learn(1, record([0.5] * nodes, accepted * (i % 2), drafted - 1.0, 1.0))


def test_time_spent_on_proposing_counts():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    assert budget.choose(1, costs(0.5)) == 1
    see(budget, 20, plain=10.0, drafted=19.0, nodes=1, accepted=1)
    assert budget.choose(1, costs(0.5)) == 0


def test_what_every_step_takes_beyond_the_table_makes_nodes_cheaper():
    budget = AutoBudget(CostModel([1, 64], [10.0, 28.9]))
    assert budget.choose(1, costs(0.02)) == 0
    for _ in range(20):
        budget.learn(1, record([], accepted=0, model_seconds=30.0))
    assert budget.choose(1, costs(0.02)) == 1
    # a machine that is faster today says nothing about the slope
    for _ in range(20):
        budget.learn(1, record([], accepted=0, model_seconds=1.0))
    assert budget.choose(1, costs(0.02)) == 0


def test_rows_cost_what_steps_took_of_them():
    """Ten nodes are said to cost 30% and take 90%, or said to take 90% and cost 30%."""
    for said, took, kept in ((13.0, 19.0, 0), (19.0, 13.0, 1)):
        budget = AutoBudget(CostModel([1, 11], [10.0, said]))
        see(budget, 20, plain=10.0, drafted=took, nodes=10, accepted=10)
        assert (budget.choose(1, costs(*[0.06] * 10)) > 0) == kept


@pytest.mark.parametrize(
    ("live", "most"), [(1, 32), (4, 32), (8, 64), (12, 96), (16, 128), (64, 128)]
)
def test_nodes_go_up_to_eight_a_live_slot_where_rows_are_cheap(live, most):
    assert most_nodes(live) == most
    assert AutoBudget(CostModel([1, 256], [1.0, 1.0])).ask(live) == most
    assert sizes_to_time(live, captured=False)[-1] <= live + most
    # 32 where more would make the step twice as slow
    assert AutoBudget(CostModel([live, live + 33, 256], [1.0, 2.1, 9.0])).ask(live) == 32


def test_a_step_has_64_rows_where_they_cost_what_one_does():
    budget = AutoBudget(CostModel([1, 8, 64, 96, 128], [1.0, 1.0, 1.0, 2.0, 3.0]))
    assert budget.ask(8) >= 56
    assert budget.choose(8, costs(*[0.2] * 64)) == 56


def test_a_step_asks_for_twice_what_the_last_ones_kept():
    budget = AutoBudget(CostModel([1, 256], [1.0, 1.0]))
    assert budget.ask(4) == 32
    for _ in range(8):
        budget.keep(5)
    assert budget.ask(4) == 10
    assert budget.ask(12) == 12
    budget.keep(1)
    budget.keep(1)
    assert budget.ask(4) == 8
    budget.keep(30)
    assert budget.ask(4) == 32


def test_tokens_of_samples_that_are_ahead_count_less():
    # a row takes a tenth of a step; 4 slots get 0.2 of a token each
    cost = CostModel([4, 64], [1.0, 7.0])
    assert AutoBudget(cost).choose(4, costs(0.2, 0.2, 0.2, 0.2)) == 0
    behind, *ahead = costs(0.2, 0.2, 0.2, 0.2)
    # 64 tokens ahead: a 16th
    starts = [0, 4 * COST_ONE, 4 * COST_ONE, -1, 4 * COST_ONE]
    paced = [behind, *(x + 4 * COST_ONE for x in ahead)]
    assert AutoBudget(cost).choose(4, paced, starts) == 1


@pytest.mark.parametrize(
    ("ahead", "counts", "low", "high"),
    [
        ([0], [3], 3, 3),
        # side by side: nearly what each got on average, and less where they part
        ([0, 0], [1, 2], 1.4, 1.5),
        ([0, 0, 0, 0], [2, 2, 2, 2], 2, 2),
        ([0, 0], [2, 40], 2, 5),
        # one that is far ahead counts for nothing, until it is the last one
        ([0, 40], [1, 9], 1, 1.001),
        ([0, 40], [4, 1], 3.999, 4),
        ([0, 2], [9, 1], 3, 6),
    ],
)
def test_tokens_of_slots_that_are_behind_count_most(ahead, counts, low, high):
    starts = [-1, *(PACE * a for a in ahead)]
    assert low - 1e-9 <= progress(starts, [0, *counts]) <= high + 1e-9


def test_what_steps_bring_adds_up_to_the_tokens_of_the_last_sample():
    rng = random.Random(0)
    for N in (1, 2, 8):
        at, total, steps = [0] * N, 0.0, 300
        for _ in range(steps):
            counts = [rng.choice((1, 1, 1, 2, 4)) for _ in at]
            total += progress([PACE * (a - min(at)) for a in at], counts)
            at = [a + n for a, n in zip(at, counts, strict=True)]
        assert min(at) - 1e-6 <= total <= min(at) + math.log(N) / BEHIND + 1e-6


def test_a_look_at_samples_side_by_side_is_read_as_what_came_true():
    """Where all wait for each other, the first step with drafts moves the last of them seldom."""
    budget = AutoBudget(flat())
    assert budget.ask(4)
    budget.choose(4, costs(0.5, 0.5, 0.5, 0.5), starts=[0] * 4)
    found = record([0.5] * 4, 1, 0.1, 1.0, rows=8)
    found.count, found.nodes = [2, 2, 1, 1], [2] * 4
    budget.learn(4, found)
    assert float(budget._learner.calibration) == pytest.approx(1, abs=0.02)


def test_what_samples_ahead_were_given_does_not_pay():
    """Drafts that come true for samples that are ahead alone lose, and end."""
    nodes = {}
    for starts in (None, [0, *[4 * COST_ONE] * 7]):
        budget, kept = AutoBudget(CostModel([8, 64], [1.0, 1.0 + 56 * 0.05])), 0
        for _ in range(200):
            nodes_of_step = 0
            if budget.ask(8):
                nodes_of_step = budget.choose(8, costs(*[0.9] * 8), starts)
                budget.keep(nodes_of_step)
            kept += nodes_of_step
            rows = 8 + nodes_of_step
            found = record([0.9] * nodes_of_step, 0, 0.0, 1 + 0.05 * nodes_of_step, rows)
            # all but the first slot's come true
            found.count, found.nodes = [1, *[2 if nodes_of_step > 1 else 1] * 7], [2] * 8
            budget.learn(8, found)
        nodes[starts is None] = kept
    assert nodes[True] > 1000
    assert nodes[False] < nodes[True] / 3


@pytest.mark.parametrize(("kept", "accepted", "better"), [(4, 4, True), (8, 7, False)])
def test_nodes_that_are_too_few_to_move_all_slots_are_counted_alone(kept, accepted, better):
    """A last slot that had no node says nothing of them; one whose node failed does."""
    budget = AutoBudget(flat())
    assert budget.ask(8)
    budget.choose(8, costs(*[0.9] * kept), starts=[0] * 8)
    found = record([0.9] * kept, 1, 0.1, 1.0, rows=8 + kept)
    found.count = [2] * accepted + [1] * (8 - accepted)
    before = float(budget._learner.calibration)
    budget.learn(8, found)
    assert (float(budget._learner.calibration) > before) == better
