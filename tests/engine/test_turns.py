"""In which steps "auto" drafts: it rests where drafts do not pay, and looks again."""

from simulated_steps import Machine, cheap, costs, dear, flat, steep, strong, table, weak

from csd.engine.budget import AutoBudget
from csd.engine.step_cost import CostModel
from csd.engine.turns import Turns


def test_it_rests_where_drafts_do_not_pay_and_looks_again():
    budget = AutoBudget(steep())
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
    budget = AutoBudget(steep())
    for _ in range(5):
        assert budget.choose(1, costs(0.5)) == 0
    assert budget.ask(1) > 0
    budget.keep(0)
    assert [budget.ask(1) > 0 for _ in range(4)] == [False, False, True, True]


def test_the_first_steps_alternate_and_one_in_64_is_without_drafts():
    budget = AutoBudget(CostModel([1, 64], [1.0, 1.1]))
    run = Machine(lambda m: 1.0, lambda step: [0.9, 0.8, 0.7], noise=0.0, slow=0.0).run(budget, 300)
    plain = [i for i, nodes in enumerate(run.nodes) if not nodes]
    assert plain[:3] == [1, 3, 5]
    assert plain[3:] == [70, 135, 200, 265]


def test_a_call_looks_less_where_drafts_of_the_last_one_lost():
    machine, cost = Machine(dear, weak, lambda step: 0.31, propose=0.4), table(dear, 1.0)
    drafted = [sum(n > 0 for n in machine.run(AutoBudget(cost), 60).nodes) for _ in range(3)]
    assert 0 < (drafted[1] + drafted[2]) / 2 < drafted[0]
    # and drafts as much as ever where they pay
    machine = Machine(cheap, strong, propose=0.05)
    assert machine.run(AutoBudget(cost), 300).rate() > 1.4 * machine.run(None, 300).rate()


def test_one_step_that_loses_does_not_end_what_many_won():
    """After drafts that won ten steps; without these a loss of one step makes them pause."""
    for wins, drafts in ((0, False), (10, True)):
        turns = Turns(flat().late)
        for _ in range(wins):
            turns.learn_drafted(gain=1.4, tokens=2.4, took=1.4, surprise=False)
        turns.learn_drafted(gain=1.3, tokens=1.0, took=2.0, surprise=False)
        assert turns.take() == drafts
    # nor may they lose as much as they won
    turns.learn_drafted(gain=1.3, tokens=1.0, took=2.0, surprise=False)
    assert not turns.take()


def test_looks_that_take_little_come_sooner():
    def rests(proposing):
        turns = Turns(flat().late)
        turns.learn_look(1 + proposing, proposing)
        for _ in range(6):
            turns.miss()
        return next(i for i in range(99) if turns.take())

    assert [rests(x) for x in (0.2, 0.05, 0.02, 0.0)] == [16, 10, 4, 16]
