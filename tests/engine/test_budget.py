"""The cost model and the choice of pool size, on scripted timings."""

from statistics import mean

import pytest
from simulated_steps import Machine, costs, record

from csd.engine.budget import AutoBudget, AutoPool, FixedBudget, FixedPool, most_nodes, progress
from csd.engine.static_step import sizes_for
from csd.engine.step_cost import CostModel
from csd.engine.time_steps import sizes_to_time
from csd.state.pool import COST_ONE, PACE


def flat():
    return CostModel([1, 64], [1.0, 1.0])


def steep():
    return CostModel([1, 2, 64], [1.0, 2.0, 64.0])


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


def test_sizes_that_are_never_worth_their_time_are_not_timed(monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr("csd.engine.step_cost.time.perf_counter", lambda: now[0])

    def run(rows):
        seen.append(rows)
        now[0] += rows

    cost = CostModel.measure(run, [1, 2, 4, 8, 16, 32], worth=6.0)
    assert cost.sizes == [1, 2, 4, 8] and cost.seconds == [1, 2, 4, 8]
    # beyond them the last two go on
    assert max(seen) == 8 and cost(16) == 16


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


def test_a_load_on_every_step_changes_nothing():
    """Steps of both kinds take three times as long."""
    late = CostModel([1, 64], [10.0, 28.9]).late
    for load in [1] * 20 + [3] * 20:
        late.learn_plain(1, 10.0 * load)
        late.learn_drafted(1, 11, 14.0 * load)
    assert late.plain(1) == 30.0 and late.ratio(1, 11) == pytest.approx(1.4)


@pytest.mark.parametrize("what", ["plain", "drafted"])
def test_one_slow_step_changes_nothing(what):
    late = CostModel([1, 64], [10.0, 28.9]).late
    for _ in range(8):
        late.learn_plain(1, 10.0)
        late.learn_drafted(1, 11, 13.0)
    before = late.plain(1), late.ratio(1, 11)
    if what == "plain":
        assert late.learn_plain(1, 90.0)
        # one that is as expected says that the other was an accident
        assert not late.learn_plain(1, 10.0)
    else:
        assert late.learn_drafted(1, 11, 90.0)
    assert (late.plain(1), late.ratio(1, 11)) == pytest.approx(before)


def test_two_slow_steps_are_another_load():
    late = CostModel([1, 64], [10.0, 28.9]).late
    for _ in range(8):
        late.learn_plain(1, 10.0)
        late.learn_drafted(1, 11, 13.0)
    # the load doubles: these are compared with what is no more
    late.learn_drafted(1, 11, 26.0)
    late.learn_drafted(1, 11, 26.0)
    late.learn_plain(1, 20.0)
    late.learn_plain(1, 20.0)
    assert late.plain(1) == 20.0 and late.ratio(1, 11) == pytest.approx(1.3)


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


def test_a_fixed_budget_keeps_everything():
    budget = FixedBudget(12)
    assert budget.ask(5) == 12
    assert budget.choose(5, costs(0.1, 0.01)) == 2


def test_sizes_and_seconds_must_match():
    with pytest.raises(ValueError, match="seconds must be one per size"):
        CostModel([1, 2], [1.0])


def test_pools_have_one_of_a_few_sizes():
    assert sizes_for(3) == [16, 32, 64, 96, 128, 160, 192, 256, 384, 512]
    assert sizes_for(700)[-2:] == [640, 768]
    fixed = FixedPool(20, sizes_for(8))
    assert fixed.pool(8) == (32, 20) and fixed.pool(13) == (64, 20)


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
    pool = AutoPool(CostModel(sizes_for(8), seconds), sizes_for(8))
    rows = None
    for _ in range(30):
        rows, nodes = pool.pool(8)
        assert rows == nodes
        drafted = rows - 8
        pool.learn(8, record([probability] * drafted, round(probability * drafted)))
    assert rows == want


def test_the_pool_never_goes_below_the_roots():
    pool = AutoPool(CostModel(sizes_for(100), [1, 2, 4, 6, 8, 10, 12, 16, 24, 32]), sizes_for(100))
    # nothing pays: the smallest size that holds every root
    assert pool.pool(100)[0] == 128
    for _ in range(30):
        pool.learn(100, record([0.05] * 28, 0))
    assert [pool.pool(live)[0] for live in (100, 129, 10)] == [128, 160, 16]


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
    ("ahead", "counts", "want"),
    [
        ([0], [3], 3),
        ([0, 40], [1, 9], 1),
        ([0, 40], [4, 1], 4),
        # the second is the last one then
        ([0, 2], [9, 1], 3),
        # two at one place wait for each other
        ([0, 0], [2, 40], 2),
    ],
)
def test_a_call_ends_sooner_by_what_its_last_samples_get(ahead, counts, want):
    starts = [-1, *(PACE * a for a in ahead)]
    assert progress(starts, [0, *counts]) == want


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


def test_the_first_steps_alternate_and_one_in_64_is_without_drafts():
    budget = AutoBudget(CostModel([1, 64], [1.0, 1.1]))
    run = Machine(lambda m: 1.0, lambda step: [0.9, 0.8, 0.7], noise=0.0, slow=0.0).run(budget, 300)
    plain = [i for i, nodes in enumerate(run.nodes) if not nodes]
    assert plain[:3] == [1, 3, 5]
    assert plain[3:] == [70, 135, 200, 265]


def weak(step):
    return [0.3, 0.15]


def strong(step):
    return [0.75, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.01]


def dear(rows):
    return 1 + 0.03 * max(rows - 16, 0)


def cheap(rows):
    return 1 + 0.008 * max(rows - 16, 0)


def doubled(step):
    return 1 + (step >= 120)


def table(seconds, disturbed):
    """What a start measures of `seconds`: rows beyond the first cost `disturbed` times as much."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    return CostModel(sizes, [1 + (seconds(m) - 1) * disturbed for m in sizes])


def auto(kind, seconds, disturbed):
    cost = table(seconds, disturbed)
    return AutoBudget(cost) if kind == "eager" else AutoPool(cost, [16, 32, 64, 128])


def best_fixed(machine, steps):
    return max(machine.run(FixedBudget(k), steps).rate() for k in range(0, 72, 8))


eager_and_static = pytest.mark.parametrize("kind", ["eager", "static"])
seeds = pytest.mark.parametrize("seed", range(4))


def test_a_call_looks_less_where_drafts_of_the_last_one_lost():
    machine, cost = Machine(dear, weak, lambda step: 0.31, propose=0.4), table(dear, 1.0)
    drafted = [sum(n > 0 for n in machine.run(AutoBudget(cost), 60).nodes) for _ in range(3)]
    assert 0 < drafted[1] + drafted[2] < drafted[0]
    # and drafts as much as ever where they pay
    machine = Machine(cheap, strong, propose=0.05)
    assert machine.run(AutoBudget(cost), 300).rate() > 1.4 * machine.run(None, 300).rate()


@eager_and_static
@pytest.mark.parametrize("load", [None, doubled], ids=["idle", "doubled"])
@pytest.mark.parametrize("disturbed", [0.5, 1.0, 2.0])
@seeds
def test_drafts_that_lose_cost_at_most_three_percent(kind, load, disturbed, seed):
    """A 0.14 of a token a sample and step, for proposing at 0.1 and rows at 0.03 of a step."""
    machine = Machine(dear, weak, lambda step: 0.31, propose=0.1, seed=seed)
    machine.load = load or machine.load
    always = machine.run(FixedBudget(16), 300)
    assert 1.12 < sum(always.tokens) / (8 * 300) < 1.16
    plain = machine.run(None, 300)
    assert always.rate() < 0.95 * plain.rate()
    assert machine.run(auto(kind, dear, disturbed), 300).rate() >= 0.97 * plain.rate()


@eager_and_static
@pytest.mark.parametrize("load", [None, doubled], ids=["idle", "doubled"])
@pytest.mark.parametrize("disturbed", [0.5, 1.0, 2.0])
def test_drafts_that_lose_cost_at_most_three_percent_where_steps_vary_by_a_third(
    kind, load, disturbed
):
    """Over six calls; in a single one the noise of a few steps counts for more."""
    shares = []
    for seed in range(6):
        machine = Machine(dear, weak, lambda step: 0.31, propose=0.1, seed=seed, noise=0.3)
        machine.load = load or machine.load
        plain, run = machine.run(None, 300), machine.run(auto(kind, dear, disturbed), 300)
        shares.append(run.rate() / plain.rate())
    assert mean(shares) >= 0.97
    assert min(shares) >= 0.95


@eager_and_static
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_drafts_that_no_longer_come_true_cost_at_most_three_percent(kind, noise):
    """In the 100 steps that follow, although the nodes' probabilities do not change."""
    shares = []
    for seed in range(12):
        machine = Machine(cheap, strong, propose=0.05, seed=seed, noise=noise)
        machine.true = lambda step: 1.0 if in_the_middle(step) else 0.05
        plain, run = machine.run(None, 400), machine.run(auto(kind, cheap, 1.0), 400)
        # neither at a call's start, nor after drafts have paid
        for begin, end in ((0, 100), (300, 400)):
            shares.append(run.rate(begin, end) / plain.rate(begin, end))
        assert run.rate(100, 300) >= 1.4 * plain.rate(100, 300)
    assert mean(shares) >= 0.97


@pytest.mark.parametrize("load", [None, doubled], ids=["idle", "doubled"])
@pytest.mark.parametrize("disturbed", [0.5, 1.0, 2.0])
@seeds
def test_drafts_that_pay_are_used(load, disturbed, seed):
    machine = Machine(cheap, strong, lambda step: 0.6, propose=0.05, seed=seed)
    machine.load = load or machine.load
    best = best_fixed(machine, 300)
    assert best > 1.5 * machine.run(None, 300).rate()
    assert machine.run(auto("eager", cheap, disturbed), 300).rate() >= 0.97 * best


def in_the_middle(step):
    return 100 <= step < 300


@eager_and_static
@pytest.mark.parametrize("known", [True, False], ids=["as drafted", "unseen"])
@seeds
def test_drafts_that_pay_for_a_while(kind, known, seed):
    """tau is 1.1, then 2.5, then 1.1; as the nodes' probabilities have it, or although they do not
    change."""
    machine = Machine(cheap, strong, propose=0.05, seed=seed)
    if known:
        machine.chain = lambda step: strong(step) if in_the_middle(step) else [0.07, 0.03]
    else:
        machine.true = lambda step: 1.0 if in_the_middle(step) else 0.05
    plain, run = machine.run(None, 400), machine.run(auto(kind, cheap, 1.0), 400)
    # that they stopped to pay takes some steps to find
    for begin, end, least in ((0, 100, 0.96), (100, 300, 1.4), (300, 400, 0.92)):
        assert run.rate(begin, end) >= least * plain.rate(begin, end)
    assert run.rate() >= 1.15 * plain.rate()
