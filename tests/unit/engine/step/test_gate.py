"""Steps in which "auto" drafts: probes with a cool-down, a credit, measurements in between."""

from itertools import pairwise

import pytest
from simulated_steps import Machine, cheap, costs, dear, steep, strong, table, weak

from csd.engine.step.budget import AutoBudget, StepTimeTable
from csd.engine.step.budget.auto import COOLDOWN, CREDIT, EXPLORE, SpeculationGate


def measured():
    """A gate that knows the time of steps without drafts."""
    gate = SpeculationGate()
    for _ in range(3):
        gate.measured(outlier=False)
    return gate


def timed(cost):
    """A budget of such a gate."""
    budget = AutoBudget(cost)
    budget.control.gate = measured()
    return budget


def test_a_probe_comes_after_twice_the_steps_of_the_last_cool_down():
    budget, asked = timed(steep()), []
    for _ in range(80):
        nodes = budget.num_draft_tokens(1)
        asked.append(nodes > 0)
        if nodes:
            budget.record_selection(budget.select(1, costs(0.5)))
    assert [i for i, a in enumerate(asked) if a][:5] == [0, 3, 8, 17, 34]


def test_choose_has_no_effect_before_keep():
    """Growing a tree asks many times a step; only what is kept in the end counts."""
    budget = timed(steep())
    for _ in range(5):
        assert budget.select(1, costs(0.5)) == 0
    assert budget.num_draft_tokens(1) > 0
    budget.record_selection(0)
    assert [budget.num_draft_tokens(1) > 0 for _ in range(4)] == [False, False, True, True]


def test_measurements_take_a_hundredth_of_the_time():
    budget = AutoBudget(StepTimeTable([1, 64], [1.0, 1.0]))
    chain = [0.9, 0.8, 0.7]
    run = Machine(lambda m: 1.0, lambda step: chain, live=1, noise=0.0, slow=0.0).run(budget, 400)
    plain = [i for i, nodes in enumerate(run.nodes) if not nodes]
    # every second step until the third
    assert plain[:3] == [1, 3, 5]
    apart = [b - a for a, b in pairwise(plain[3:])]
    gain = 1 + sum(chain)
    assert apart and all((1 - 1 / gain) / n == pytest.approx(EXPLORE, rel=0.2) for n in apart)


def test_a_probe_of_the_longest_cool_down_drafts_whatever_is_expected():
    gate = measured()
    for n in range(1, 8):
        assert gate.should_draft()
        assert gate.probe == (2 ** (n - 1) >= COOLDOWN)
        gate.back_off()
        assert [gate.should_draft() for _ in range(min(2**n, COOLDOWN))].count(True) == 0


def test_drafting_pauses_when_the_credit_is_spent():
    gate = measured()
    gate.drafted(tokens=1.0, took=1.0 + CREDIT + 2.5 * EXPLORE, pays=True, outlier=False)
    assert [gate.should_draft() for _ in range(5)] == [False, False, True, True, True]


def test_what_drafts_won_may_be_lost_again():
    for wins, drafts in ((0, False), (2, True)):
        gate = measured()
        for _ in range(wins):
            gate.drafted(tokens=2.4, took=1.4, pays=True, outlier=False)
        gate.drafted(tokens=1.0, took=1.2 + CREDIT, pays=True, outlier=False)
        assert gate.should_draft() == drafts
    for _ in range(100):
        gate.drafted(tokens=2.4, took=1.4, pays=True, outlier=False)
    gate.drafted(tokens=1.0, took=1.2 + 4 * CREDIT, pays=True, outlier=False)
    assert not gate.should_draft()


def test_two_outliers_in_a_row_are_measured():
    gate = measured()
    for outliers, drafts in ((1, True), (2, False)):
        gate.should_draft(), gate.should_draft()
        for _ in range(outliers):
            gate.drafted(tokens=2.0, took=1.0, pays=True, outlier=True)
        assert gate.should_draft() == drafts
    # an outlier of a step without drafts may be an accident: the next but one decides
    gate.measured(outlier=True)
    assert [gate.should_draft() for _ in range(2)] == [True, False]


def test_a_call_does_not_depend_on_the_one_before():
    cost = table(dear, 1.0)

    def run():
        return Machine(dear, weak, lambda step: 0.31, propose=0.4).run(AutoBudget(cost), 60)

    first = run()
    Machine(cheap, strong, propose=0.05).run(AutoBudget(cost), 300)
    assert run() == first and 0 < sum(n > 0 for n in first.nodes) < 20
