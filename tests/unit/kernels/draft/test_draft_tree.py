"""Drafts against the plain model of `tests/unit/kernels/draft/draft_model.py`, and their costs."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_model import draft, grown
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import (
    CONFIG,
    equal_slots,
    odd_case,
    one_slot,
    parts_of_prior,
    random_graph,
    random_prior,
    random_slots,
    start_greedily,
)
from helpers.kernels.draft_cases import PRIOR as PRIOR_CONFIG
from helpers.oracles.graph_model import Graph
from helpers.targets import few

from csd.kernels.draft import draft_tree_ref
from csd.kernels.draft.constants import level_cost
from csd.state.pool import MAX_CHILDREN, MAX_NODES
from csd.state.pool import PRIOR as SOURCE


def check_invariants(pool, slots):
    drafted = pool.depth > 0
    rows = drafted.nonzero()[:, 0]
    parent = pool.parent[rows].long()
    assert (parent < rows).all() and (parent >= 0).all()
    assert torch.equal(pool.slot[parent], pool.slot[rows])
    assert torch.equal(pool.depth[parent] + 1, pool.depth[rows])
    assert torch.equal(pool.position[parent] + 1, pool.position[rows])
    assert (pool.cost[parent] <= pool.cost[rows]).all()
    place = rows - pool.slot_start[pool.slot[rows].long()]
    assert torch.equal(pool.ancestors[rows], pool.ancestors[parent] | (1 << place))
    assert torch.equal(pool.context[rows, 0], pool.token[rows])
    assert torch.equal(pool.context[rows, 1:], pool.context[parent, :-1])
    pairs = list(zip(parent.tolist(), pool.token[rows].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert max([sum(p == q for q, _ in pairs) for p, _ in pairs], default=0) <= MAX_CHILDREN

    live = slots.live.nonzero()[:, 0]
    assert torch.equal(pool.slot_nodes > 0, slots.live)
    assert pool.slot_nodes.max() <= MAX_NODES
    used = int(pool.slot_nodes.sum())
    assert (pool.slot[:used] >= 0).all() and (pool.slot[used:] == -1).all()
    starts = pool.slot_start[live].long()
    assert (pool.depth[starts] == 0).all() and (pool.ancestors[starts] == 1).all()
    for s in live.tolist():
        own = slice(int(pool.slot_start[s]), int(pool.slot_start[s] + pool.slot_nodes[s]))
        assert (pool.slot[own] == s).all()
        assert (pool.cost[own].diff() >= 0).all()
        g = int(slots.group[s])
        assert pool.group_start[g] <= own.start and own.stop <= pool.group_start[g + 1]
    depth = pool.depth[:used]
    assert (
        slots.generated[pool.slot[:used].long()] + depth
        < slots.max_new.clamp(min=1)[pool.slot[:used].long()]
    )[depth > 0].all()


@few(8)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("count", "extra"),
    [(1, 1), (3, 2), (5, 0), (7, 23), (9, 60), (4, 400)],
    ids=["one", "tight", "roots", "ragged", "wide", "loose"],
)
def test_equals_the_model(seed, count, extra):
    rng = random.Random(seed)
    config = replace(
        CONFIG,
        beta=rng.choice([0.5, 0.6, 1.0]),
        frontier=rng.choice([1, 3, 8]),
        max_depth=rng.choice([2, 5, 16]),
        min_prob=rng.choice([0, 0, 0.01]),
    )
    graph = random_graph(rng, config)
    slots = random_slots(rng, count, config)
    slots.live[rng.randrange(count)] = True
    rows = int(slots.live.sum()) + extra
    pool = draft_tree_ref(graph.table(), slots, rows, config)
    assert_equal_fields(pool, draft(graph, slots, rows))
    check_invariants(pool, slots)


@few(5)
@pytest.mark.parametrize("seed", range(24))
def test_equals_the_model_at_odd_sizes(seed):
    config, graph, slots = odd_case(random.Random(1000 + seed))
    live = int(slots.live.sum())
    table, trees = graph.table(), grown(graph, slots)
    for extra in (0, 1, 17, 62, 63, 64, 65, 300):
        if live + extra:
            pool = draft_tree_ref(table, slots, live + extra, config)
            assert_equal_fields(pool, draft(graph, slots, live + extra, trees=trees))
            check_invariants(pool, slots)


@few(4)
@pytest.mark.parametrize("seed", range(16))
def test_a_prior_equals_the_model(seed):
    rng = random.Random(3000 + seed)
    orders = rng.choice([(1, 2, 3), (1, 2, 3, 5, 8), (3,), (1, 2, 3, 4, 5, 6, 7)])
    config = replace(
        CONFIG,
        orders=orders,
        successors=rng.choice([3, 8, 16]),
        frontier=rng.choice([1, 3, 8]),
        prior_orders=rng.choice([(1,), (1, 2), (1, 2, 3), (2, 3)]),
        prior_trust=rng.choice([0.3, 0.7]),
        prior_smoothing=rng.choice([1, 1000, 1 << 17]),
        own_weight=rng.choice([1.0, 4.0]),
        max_depth=rng.choice([2, 16]),
    )
    count, vocab = rng.choice([1, 5, 9]), rng.choice([5, 11, 40])
    graph = random_graph(rng, config, vocab, rng.choice([2, 30]))
    of_prior = replace(PRIOR_CONFIG, successors=rng.choice([2, 8, 16]))
    graph.prior = random_prior(rng, of_prior, vocab, rng.choice([1, 25, 90]))
    slots = random_slots(rng, count, config, vocab, live=True)
    trees = grown(graph, slots)
    for extra in (1, 17, 64, 300):
        pool = draft_tree_ref(graph.table(), slots, count + extra, config)
        assert_equal_fields(pool, draft(graph, slots, count + extra, trees=trees))
        check_invariants(pool, slots)


@pytest.mark.parametrize("seed", range(3))
def test_a_group_reads_only_its_part_of_a_prior(seed):
    rng = random.Random(6000 + seed)
    graph = random_graph(rng, vocab=9, tokens=20)
    slots = random_slots(rng, 5, vocab=9, live=True)
    table = graph.table()
    table.prior, alone = parts_of_prior(rng, vocab=9)
    for i, part in enumerate(alone):
        slots.prior_part.fill_(i)
        pool = draft_tree_ref(table, slots, 90, CONFIG)
        assert (pool.source == SOURCE).any()
        slots.prior_part.fill_(0)
        assert_equal_fields(pool, draft_tree_ref(replace(table, prior=part), slots, 90, CONFIG))


def test_a_prior_drafts_where_the_group_has_no_text():
    graph, slots = random_graph(random.Random(1), groups=(12,)), one_slot()
    graph.prior = random_prior(random.Random(2))
    assert draft_tree_ref(graph.table(), slots, 20, CONFIG).slot_nodes[0] > 4
    graph.prior = None
    assert draft_tree_ref(graph.table(), slots, 20, CONFIG).slot_nodes[0] == 1


@pytest.mark.parametrize("seed", range(4))
def test_ties_go_by_slot_depth_token_and_parent(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, weights=[4096], vocab=4, groups=(11,))
    slots = equal_slots(rng, 6, vocab=4, groups=(11,))
    trees = grown(graph, slots)
    for rows in (7, 10, 17, 40):
        pool = draft_tree_ref(graph.table(), slots, rows, CONFIG)
        assert_equal_fields(pool, draft(graph, slots, rows, trees=trees))
    assert len(pool.cost.unique()) < rows / 2


@pytest.mark.parametrize("seed", range(3))
def test_a_smaller_pool_keeps_a_prefix_of_every_slots_list(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    slots = random_slots(rng, 6, live=True)
    slots.max_new[:] = 99
    table = graph.table()
    large = draft_tree_ref(table, slots, 6 + 48, CONFIG)
    for rows in range(6, 6 + 48, 5):
        small = draft_tree_ref(table, slots, rows, CONFIG)
        assert int(small.slot_nodes.sum()) == rows
        for s in range(6):
            n, a, b = int(small.slot_nodes[s]), int(small.slot_start[s]), int(large.slot_start[s])
            for name in ("token", "depth", "cost", "source", "ancestors", "context"):
                x, y = getattr(small, name), getattr(large, name)
                assert torch.equal(x[a : a + n], y[b : b + n]), name


def test_the_64th_node_is_the_sign_bit():
    rng = random.Random(3)
    graph = random_graph(rng, groups=(11,))
    slots = one_slot()
    pool = draft_tree_ref(graph.table(), slots, 200, CONFIG)
    assert_equal_fields(pool, draft(graph, slots, 200))
    check_invariants(pool, slots)
    assert pool.slot_nodes[0] == MAX_NODES
    assert pool.ancestors[63] < 0 and pool.token[64] == -1


def test_the_cap_of_a_slot_leaves_its_rows_to_the_others():
    graph = random_graph(random.Random(3), groups=(11, 12))
    slots = random_slots(random.Random(0), 2, live=True)
    slots.group[:] = torch.tensor([0, 1])
    start_greedily(slots, max_new=90)
    pool = draft_tree_ref(graph.table(), slots, 127, CONFIG)
    assert_equal_fields(pool, draft(graph, slots, 127))
    assert pool.slot_nodes.sum() == 127 and pool.slot_nodes.max() == MAX_NODES


@pytest.mark.parametrize("case", ["empty-table", "no-live-slot", "roots-only"])
def test_roots_alone(case):
    graph = Graph(CONFIG) if case == "empty-table" else random_graph(random.Random(1))
    slots = random_slots(random.Random(2), 5, live=case != "no-live-slot")
    rows = 5 if case == "roots-only" else 12
    pool = draft_tree_ref(graph.table(), slots, rows, CONFIG)
    assert_equal_fields(pool, draft(graph, slots, rows))
    assert pool.slot_nodes.sum() == (0 if case == "no-live-slot" else 5)


def test_noise_in_place_of_the_keyed_one():
    rng = random.Random(4)
    graph = random_graph(rng)
    slots = random_slots(rng, 4, live=True)
    slots.temperature[:] = 0.7
    slots.max_new[:] = 99
    values = {}

    def one(s, position, token):
        return values.setdefault((s, position, token), rng.gauss(0, 2))

    def noise(slot, position, token):
        rows = zip(slot.tolist(), position.tolist(), token.tolist(), strict=True)
        return torch.tensor([[one(s, p, t) for t in ts] for s, p, ts in rows], dtype=torch.float64)

    pool = draft_tree_ref(graph.table(), slots, 30, CONFIG, noise)
    assert_equal_fields(pool, draft(graph, slots, 30, one))
    keyed = draft_tree_ref(graph.table(), slots, 30, CONFIG)
    assert not torch.equal(pool.token, keyed.token)


def test_coupled_scores_favour_what_the_noise_will_draw():
    # two equal successors: the one of larger noise comes first
    graph = Graph(CONFIG)
    graph.insert([(11, [0, 1, 2], [(3, 30000), (4, 30000)], 65536, 0)], [11])
    slots = one_slot(temperature=0.7)
    slots.context[0] = torch.tensor([0, 1, 2])
    first = []
    for lucky in (3, 4):

        def noise(slot, position, token, lucky=lucky):
            return torch.where(token == lucky, 2.0, -1.0).double()

        first.append(draft_tree_ref(graph.table(), slots, 3, CONFIG, noise).token[1].item())
    assert first == [3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_wholly_uncoupled_is_drafted_as_where_nothing_is_sampled(seed):
    rng = random.Random(seed)
    config = replace(CONFIG, uncoupled=1.0, own_weight=1.0, group_penalty=0)
    graph, slots = random_graph(rng, config), random_slots(rng, 6, config, live=True)
    slots.temperature.fill_(0.7)
    some, half = (
        draft_tree_ref(graph.table(), slots, 60, replace(config, uncoupled=u)) for u in (1.0, 0.5)
    )
    slots.temperature.fill_(0)
    want = draft_tree_ref(graph.table(), slots, 60, config)
    # a probability may be rounded to either of two multiples of 2^-24
    assert torch.equal(some.token, want.token) and torch.equal(some.parent, want.parent)
    assert (some.cost - want.cost).abs().max() <= 16
    assert not torch.equal(half.token, want.token)


def test_a_level_costs_less_for_a_sample_that_commits_more():
    usual = CONFIG.level_cost
    generated = np.array([0, 20, 60, 100, 1000, 100, 1 << 20])
    step = np.array([0, 8, 8, 4, 10, 100, 1 << 20])
    # in proportion to (steps + 8) / (tokens + 20), within bounds
    most = 3 * usual // 2
    expected = [usual, usual, usual // 2, usual // 4, usual // 4, most, most]
    assert level_cost(CONFIG, generated, step).tolist() == expected
    frozen = replace(CONFIG, settle=0)
    assert level_cost(frozen, generated, step).tolist() == [usual] * 7


def test_a_sample_that_commits_more_drafts_deeper():
    graph = random_graph(random.Random(1), groups=(11,), tokens=150)
    means = []
    for step in (80, 32, 10):
        slots = one_slot(max_new=200)
        slots.generated[0], slots.step[0] = 80, step
        pool = draft_tree_ref(graph.table(), slots, 49, CONFIG)
        assert_equal_fields(pool, draft(graph, slots, 49))
        means.append(float(pool.depth.float().mean()))
    assert means[0] < means[1] < means[2]
