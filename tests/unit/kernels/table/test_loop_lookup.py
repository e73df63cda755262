"""Contexts as a CPU's loops hash and find them: as the reference does, exactly."""

import random
from dataclasses import replace

import numpy as np
import pytest
from collisions import same_hash
from helpers.kernels.draft_cases import CONFIG, random_graph

from csd.kernels.table.cpu.lookup import find_entry, hash_prefix, order_sizes
from csd.kernels.table.lookup import ENTRIES, MAX_ORDER, find_contexts, hash_contexts, order_masks
from csd.state.context_table import ANY, GraphConfig


def hashes(owner, context, orders):
    code = np.empty((len(owner), len(orders)), np.int64)
    for r in range(len(owner)):
        hash_prefix(owner[r], context[r], order_sizes(orders), code[r])
    return code


@pytest.mark.parametrize("orders", [(1,), (16,), (1, 2, 3, 5, 8, 12, 16), (2, 7)], ids=str)
@pytest.mark.parametrize("N", [16, 17], ids=["N", "longer"])
def test_hashes_are_the_references(orders, N):
    """Groups and tokens are any, also where products and sums pass 2^63."""
    rng = np.random.default_rng(0)
    owner = rng.integers(-(2**63), 2**63 - 1, 300)
    context = rng.integers(-1, 2**31 - 1, (300, N), dtype=np.int32)
    context[::3] = rng.integers(-1, 4, (100, N))
    context[:5, 0] = [ANY, 2**31 - 1, 2**31 - 2, -1, 0]
    context = context[:, :MAX_ORDER]
    assert np.array_equal(hashes(owner, context, orders), hash_contexts(owner, context, orders))


def test_entries_are_the_references():
    """Contexts are there or not, cut at the start, or the whole group's."""
    rng = random.Random(3)
    config = replace(CONFIG, capacity=64, ways=4)
    table = random_graph(rng, config).table().arrays()
    N, entries, capacity = config.context, ENTRIES(table), config.capacity
    context = np.array([[rng.randrange(-1, 6) for _ in range(N)] for _ in range(400)], np.int32)
    context[::7] = [ANY, *[-1] * (N - 1)]
    owner = np.array([rng.choice([11, 12, 13]) for _ in context])
    code, (_, inside) = hashes(owner, context, config.orders), order_masks(config.orders, N)
    found = 0
    for o, order in enumerate(config.orders):
        tokens = np.where(inside[o], context, -1)
        want = find_contexts(table, owner, tokens, code[:, o])
        for r in range(len(context)):
            got = find_entry(
                entries, 0, capacity, table.ways, owner[r], context[r], order, code[r, o]
            )
            assert got == want[r]
            found += got >= 0
    assert 0 < found < code.size


def test_the_first_entry_of_a_hash_decides():
    config = GraphConfig(orders=(3,), capacity=32, ways=16)
    table = random_graph(random.Random(0), config).table().arrays()
    rows = same_hash(12)
    owner, context = np.array([g for g, _ in rows]), np.array([c for _, c in rows], np.int32)
    code = hashes(owner, context, (3,))[:, 0]
    assert len(np.unique(code)) == 1 and len(np.unique(owner)) > 4
    base = int(code[0] & (table.buckets - 1)) * table.ways
    for first in (0, 1, 5):
        # the same bucket holds two of one hash
        for entry, r in ((base + 3, first), (base + 9, 2)):
            table.entry_group[entry], table.entry_hash[entry] = owner[r], code[r]
            table.entry_tokens[entry] = context[r]
        want = find_contexts(table, owner, context, code)
        for r in range(len(rows)):
            got = find_entry(ENTRIES(table), 0, 32, table.ways, owner[r], context[r], 3, code[r])
            assert got == want[r] == (base + 3 if r == first else -1)
