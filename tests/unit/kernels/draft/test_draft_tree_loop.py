"""The draft loop against the reference, field by field."""

import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import (
    CONFIG,
    PRIOR,
    equal_slots,
    odd_case,
    one_slot,
    parts_of_prior,
    random_graph,
    random_prior,
    random_slots,
    used_pool,
)

from csd.kernels.draft import draft_tree_ref
from csd.kernels.draft.cpu import draft_tree as module
from csd.kernels.draft.cpu.draft_tree import draft_tree
from csd.kernels.numba.math import places_in_order
from csd.state.context_table import GraphConfig
from csd.state.pool import MAX_NODES
from csd.state.pool import PRIOR as SOURCE


def both(table, slots, rows, config=CONFIG, **options):
    want = draft_tree_ref(table, slots, rows, config, **options)
    # memory that held another pool before
    used = used_pool(rows, slots.count, config.context)
    with patch.object(module, "allocate_pool", lambda slots, rows: used):
        assert draft_tree(table, slots, rows, config, **options) is used
    assert_equal_fields(used, want)
    return want


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_reference(seed):
    config, graph, slots = odd_case(random.Random(2000 + seed), (1, 2, 5, 13, 40))
    table, live = graph.table(), int(slots.live.sum())
    for extra in (0, 1, 17, 62, 63, 64, 65, 300):
        if live + extra:
            both(table, slots, live + extra, config)


@pytest.mark.parametrize("seed", range(10))
def test_a_prior_equals_the_reference(seed):
    rng = random.Random(4000 + seed)
    config = replace(
        CONFIG,
        orders=rng.choice([(1, 2, 3), (3,), (1, 2, 3, 4, 5, 6, 7)]),
        successors=rng.choice([3, 16]),
        frontier=rng.choice([1, 3, 8]),
        prior_orders=rng.choice([(1,), (1, 2, 3), (2, 3)]),
        prior_trust=rng.choice([0.3, 0.7]),
        prior_smoothing=rng.choice([1, 1000, 1 << 17]),
        own_weight=rng.choice([1.0, 4.0]),
    )
    count, vocab = rng.choice([1, 5, 9]), rng.choice([5, 11, 40])
    graph = random_graph(rng, config, vocab, rng.choice([2, 30]))
    of_prior = replace(PRIOR, successors=rng.choice([2, 8, 16]))
    graph.prior = random_prior(rng, of_prior, vocab, rng.choice([1, 25, 90]))
    slots = random_slots(rng, count, config, vocab, live=True)
    for extra in (1, 17, 300):
        both(graph.table(), slots, count + extra, config)


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_prior_equal_the_reference(seed):
    rng = random.Random(7000 + seed)
    graph = random_graph(rng, vocab=9, tokens=20)
    slots = random_slots(rng, 9, vocab=9, live=True)
    table = graph.table()
    table.prior, _ = parts_of_prior(rng, vocab=9)
    slots.prior_part.copy_(torch.randint(3, slots.prior_part.shape))
    for rows in (12, 60, 300):
        both(table, slots, rows, CONFIG)


def test_a_prior_drafts_where_the_group_has_no_text():
    graph = random_graph(random.Random(1), groups=(12,))
    graph.prior = random_prior(random.Random(2))
    pool = both(graph.table(), one_slot(), 20)
    assert (pool.source == SOURCE).sum() == pool.slot_nodes[0] - 1 > 3


@pytest.mark.parametrize("seed", range(4))
def test_ties_go_by_slot_depth_token_and_parent(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, weights=[4096], vocab=4, groups=(11,))
    slots = equal_slots(rng, 6, vocab=4, groups=(11,))
    for rows in (7, 10, 17, 40):
        pool = both(graph.table(), slots, rows)
    assert len(pool.cost.unique()) < rows / 2


def test_the_64th_node_is_the_sign_bit():
    pool = both(random_graph(random.Random(3), groups=(11,)).table(), one_slot(), 200)
    assert pool.slot_nodes[0] == MAX_NODES and pool.ancestors[63] < 0


@pytest.mark.parametrize("case", ["empty-table", "no-live-slot"])
def test_roots_alone(case):
    graph = random_graph(random.Random(1), tokens=1 if case == "empty-table" else 60)
    slots = random_slots(random.Random(2), 5, live=case != "no-live-slot")
    assert both(graph.table(), slots, 12).slot_nodes.sum() == (case == "empty-table") * 5


@pytest.mark.parametrize("nodes", [0, 1, 9])
def test_fewer_nodes_than_rows(nodes):
    slots = random_slots(random.Random(5), 6, live=True)
    slots.max_new[:] = 99
    graph = random_graph(random.Random(5))
    pool = both(graph.table(), slots, 40, nodes=nodes)
    assert (pool.depth > 0).sum() == nodes


def test_a_token_counts_in_all_of_sixteen_orders_and_the_group():
    config = GraphConfig(orders=tuple(range(1, 17)), capacity=4096, successors=4)
    graph = random_graph(random.Random(2), config, vocab=40, tokens=200)
    both(graph.table(), random_slots(random.Random(2), 9, config, vocab=40), 80, config)


def test_other_costs_and_limits_change_the_trees():
    """Each part of a configuration reaches the loop, and not the reference alone."""
    graph = random_graph(random.Random(8), vocab=8)
    slots = random_slots(random.Random(8), 6, vocab=8, live=True)
    slots.max_new[:] = 99
    table = graph.table()
    usual = draft_tree(table, slots, 40, CONFIG)
    for change in (
        dict(decay=0.3),
        dict(frontier=1),
        dict(max_depth=1),
        dict(uncoupled=0.9),
        dict(own_weight=0.1),
        dict(trust=0.2),
        dict(beta=2.0),
        dict(min_prob=0.2),
        dict(smoothing=1 << 20),
    ):
        other = draft_tree(table, slots, 40, replace(CONFIG, **change))
        assert not torch.equal(other.cost, usual.cost), change


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 16, 17, 100, 1000])
def test_places_in_order(size):
    key = np.random.default_rng(size).integers(-5, max(size // 2, 1), size)
    assert (places_in_order(key) == key.argsort(kind="stable")).all()
