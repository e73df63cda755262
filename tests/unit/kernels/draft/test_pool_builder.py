"""Pools of roots and nodes against a plain model, row by row."""

import random

import numpy as np
import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import random_slots

from csd.graph.host_tree import Row, pool_of_rows
from csd.state.pool import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, ROOT, Pool
from csd.state.pool_builder import Nodes, pool_of, roots
from csd.state.record import declared


def random_tree(rng, most):
    """Rows of at most `most` nodes, parents first; chains of MAX_DEPTH among them."""
    tree, deep = [], rng.random() < 0.3
    for i in range(rng.randrange(most + 1)):
        parent = i - 1 if deep else rng.randrange(-1, i)
        if parent >= 0 and tree[parent].depth == MAX_DEPTH:
            parent = -1
        if sum(row.parent == parent for row in tree) < MAX_CHILDREN:
            depth = tree[parent].depth + 1 if parent >= 0 else 1
            tree.append(Row(rng.randrange(99), parent, depth, rng.randrange(1 << 20), 1 + i % 5))
        else:
            break
    return tree


def plain_pool(trees, slots, rows):
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    pool, m = Pool.empty(rows, S, G, N), 0
    for g in range(G):
        pool.group_start[g] = m
        for s in range(S):
            if not slots.live[s] or slots.group[s] != g:
                continue
            first, pool.slot_start[s] = m, m
            tree = [Row(int(slots.context[s, 0]), -1, 0, 0, ROOT), *trees.get(s, [])]
            words, contexts = [], []
            for i, row in enumerate(tree):
                above = row.parent + 1 if i else -1
                words.append(1 << i | (words[above] if i else 0))
                last = contexts[above][:-1] if i else slots.context[s, 1:].tolist()
                contexts.append([row.token, *last])
                pool.token[m], pool.slot[m], pool.depth[m] = row.token, s, row.depth
                pool.parent[m] = first + above if i else -1
                pool.position[m] = slots.prompt_len[g] + slots.generated[s] + row.depth
                pool.ancestors[m] = words[i] - (1 << 64 if words[i] >> 63 else 0)
                pool.cost[m], pool.source[m] = row.cost, row.source
                pool.context[m] = torch.tensor(contexts[i])
                m += 1
            pool.slot_nodes[s] = m - first
    pool.group_start[G] = m
    return pool


def case(seed):
    rng = random.Random(seed)
    slots = random_slots(rng, rng.choice([1, 2, 5, 13]), groups=(11, 12, 13), live=None)
    live = slots.live.nonzero()[:, 0].tolist()
    rng.shuffle(live)
    most = rng.choice([0, 1, 7, MAX_NODES - 1])
    trees = {s: random_tree(rng, most) for s in live if rng.random() < 0.9}
    rows = len(live) + sum(map(len, trees.values())) + rng.choice([0, 1, 9])
    return slots, trees, rows


@pytest.mark.parametrize("seed", range(60))
def test_pools_are_the_plain_models(seed):
    slots, trees, rows = case(seed)
    pool = pool_of_rows(trees, slots, rows)
    assert_equal_fields(pool, plain_pool(trees, slots, rows))
    assert all(getattr(pool, name).is_contiguous() for name in declared(Pool))


@pytest.mark.parametrize("seed", range(20))
def test_nodes_of_several_slots_may_be_mixed_and_left_out(seed):
    """The order of one slot's nodes counts alone; nodes with slot -1 are not in the pool."""
    slots, trees, rows = case(seed)
    rng = random.Random(seed)
    left = {s: list(enumerate(tree)) for s, tree in trees.items()}
    columns, place = [], {}
    while any(left.values()):
        s = rng.choice([s for s, tree in left.items() if tree])
        i, row = left[s].pop(0)
        if rng.random() < 0.2:
            columns.append((7, 7, -1, 3, rng.randrange(-1, len(columns) + 1), 2))
        place[s, i] = len(columns)
        above = place[s, row.parent] if row.parent >= 0 else -1
        columns.append((row.cost, row.token, s, row.depth, above, row.source))
    nodes = Nodes(*np.array(columns, np.int64).reshape(-1, 6).T)
    assert_equal_fields(pool_of(slots, rows, nodes), plain_pool(trees, slots, rows))


@pytest.mark.parametrize("live", [None, False])
def test_roots_are_a_pool_without_nodes(live):
    slots = random_slots(random.Random(3), 7, live=live)
    for rows in (int(slots.live.sum()), 9):
        assert_equal_fields(roots(slots, rows), plain_pool({}, slots, rows))
        assert_equal_fields(pool_of_rows({}, slots, rows), plain_pool({}, slots, rows))
