"""Numbers of nodes that a step asks for and keeps, on scripted timings."""

import pytest
from simulated_steps import costs, flat, record, steep

from csd.engine.first_call.time_steps import sizes_to_time
from csd.engine.step.budget import AutoBudget, Budget, StepTimeTable, most_nodes
from csd.state.pool import COST_ONE


def test_a_fixed_budget_keeps_everything():
    budget = Budget(12)
    assert budget.num_draft_tokens(5) == 12
    assert budget.select(5, costs(0.1, 0.01)) == 2


@pytest.mark.parametrize(
    ("cost", "kept"), [(flat(), 4), (steep(), 0), (StepTimeTable([1, 64], [10.0, 28.9]), 2)]
)
def test_nodes_are_kept_while_they_pay(cost, kept):
    """At 10 + 0.3 a row, one live slot: 0.9 and 0.4 pay, 0.02 and 0.01 do not."""
    assert AutoBudget(cost).select(1, costs(0.02, 0.9, 0.01, 0.4)) == kept


def test_drafts_that_keep_failing_count_less():
    budget = AutoBudget(StepTimeTable([1, 64], [10.0, 28.9]))
    for _ in range(60):
        budget.update(1, record([0.5] * 4, accepted=0))
    assert budget.select(1, costs(0.4, 0.3)) == 0


def see(budget, steps, plain, drafted, nodes, accepted=0):
    """Steps over one slot, with drafts and without, of so many seconds."""
    for i in range(steps):
        budget.update(1, record([], 0, model_seconds=plain))
        budget.update(1, record([0.5] * nodes, accepted * (i % 2), drafted - 1.0, 1.0))


def test_time_spent_on_proposing_counts():
    budget = AutoBudget(StepTimeTable([1, 2, 64], [10.0, 10.3, 28.9]))
    assert budget.select(1, costs(0.5)) == 1
    see(budget, 20, plain=10.0, drafted=19.0, nodes=1, accepted=1)
    assert budget.select(1, costs(0.5)) == 0


def test_rows_cost_what_steps_took_of_them():
    """Ten nodes are said to cost 30% and take 90%, or said to take 90% and cost 30%."""
    for predicted, took, kept in ((13.0, 19.0, 0), (19.0, 13.0, 1)):
        budget = AutoBudget(StepTimeTable([1, 11], [10.0, predicted]))
        see(budget, 20, plain=10.0, drafted=took, nodes=10, accepted=10)
        assert (budget.select(1, costs(*[0.06] * 10)) > 0) == kept


@pytest.mark.parametrize(("live", "most"), [(1, 32), (2, 64), (4, 128), (64, 128)])
def test_an_automatic_step_drafts_at_most_32_a_slot_and_128(live, most):
    assert most_nodes(live) == most
    budget = AutoBudget(StepTimeTable([1, 256], [1.0, 1.0]))
    budget.record_selection(500)
    assert budget.num_draft_tokens(live) == most
    assert sizes_to_time(live, static=False)[-1] <= live + most


def test_a_step_has_64_rows_where_they_cost_what_one_does():
    budget = AutoBudget(StepTimeTable([1, 8, 64, 96, 128], [1.0, 1.0, 1.0, 2.0, 3.0]))
    assert budget.select(8, costs(*[0.2] * 64)) == 56


def test_a_step_asks_for_twice_what_the_last_ones_kept():
    budget = AutoBudget(StepTimeTable([1, 256], [1.0, 1.0]))
    for live, kept, asked in (
        (4, 1, 32),
        (4, 1, 16),
        (4, 1, 8),
        (12, 1, 24),
        (4, 30, 60),
    ):
        budget.record_selection(kept)
        # every second step of the first is measured
        assert max(budget.num_draft_tokens(live), budget.num_draft_tokens(live)) == asked


def test_tokens_of_samples_that_are_ahead_count_less():
    # a row takes a tenth of a step; 4 slots get 0.2 of a token each
    cost = StepTimeTable([4, 64], [1.0, 7.0])
    assert AutoBudget(cost).select(4, costs(0.2, 0.2, 0.2, 0.2)) == 0
    behind, *ahead = costs(0.2, 0.2, 0.2, 0.2)
    # 64 tokens ahead: a 16th
    penalties = [0, 4 * COST_ONE, 4 * COST_ONE, -1, 4 * COST_ONE]
    paced = [behind, *(x + 4 * COST_ONE for x in ahead)]
    assert AutoBudget(cost).select(4, paced, penalties) == 1


def test_what_samples_ahead_were_given_does_not_pay():
    """Drafts that come true for samples that are ahead alone lose, and end."""
    nodes = {}
    for penalties in (None, [0, *[4 * COST_ONE] * 7]):
        budget, kept = AutoBudget(StepTimeTable([8, 64], [1.0, 1.0 + 56 * 0.05])), 0
        for _ in range(200):
            nodes_of_step = 0
            if budget.num_draft_tokens(8):
                nodes_of_step = budget.select(8, costs(*[0.9] * 8), penalties)
                budget.record_selection(nodes_of_step)
            kept += nodes_of_step
            rows = 8 + nodes_of_step
            found = record([0.9] * nodes_of_step, 0, 0.0, 1 + 0.05 * nodes_of_step, rows)
            # all but the first slot's come true
            found.count, found.nodes = [1, *[2 if nodes_of_step > 1 else 1] * 7], [2] * 8
            budget.update(8, found)
        nodes[penalties is None] = kept
    assert nodes[True] > 1000
    assert nodes[False] < nodes[True] / 3
