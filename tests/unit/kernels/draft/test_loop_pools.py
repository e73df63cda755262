"""Pools of roots, node costs and pruned pools: loops against their references."""

import random

import pytest
import torch

pytest.importorskip("numba")

from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import CONFIG, random_graph, random_slots

from csd.kernels.draft import draft_tree_ref
from csd.kernels.draft.cpu.pools import node_costs, prune, roots
from csd.state.pool_builder import node_costs as node_costs_ref
from csd.state.pool_builder import prune as prune_ref
from csd.state.pool_builder import roots as roots_ref


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_reference(seed, poison):
    rng = random.Random(seed)
    count = rng.choice([1, 2, 5, 13, 40])
    slots = random_slots(rng, count, groups=tuple(range(11, 11 + rng.choice([1, 2, 5]))))
    live = int(slots.live.sum())
    for rows in (live, live + 1, live + 30):
        assert_equal_fields(roots(slots, rows), roots_ref(slots, rows))


def test_no_slot_is_live(poison):
    slots = random_slots(random.Random(0), 4, live=False)
    assert not slots.live.any()
    for rows in (0, 3):
        assert_equal_fields(roots(slots, rows), roots_ref(slots, rows))


def test_slots_of_one_group_stay_in_order():
    slots = random_slots(random.Random(1), 6, CONFIG, live=True)
    slots.group[:] = torch.tensor([1, 0, 1, 0, 1, 0])
    slots.live[2] = False
    assert roots(slots, 5).slot.tolist() == [1, 3, 5, 0, 4]


@pytest.mark.parametrize("paced", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_prices_and_the_cheapest_rows_equal_the_references(seed, paced, poison):
    rng = random.Random(100 + seed)
    count = rng.choice([1, 2, 5, 13])
    slots = random_slots(rng, count, vocab=5, groups=(11, 12))
    slots.progress_penalty[:] = rng.choice([1, 4096, 30000]) if paced else 0
    live, graph = int(slots.live.sum()), random_graph(rng, vocab=5, groups=(11, 12)).table()
    # with rows of padding where the graph holds too little
    for extra in (0, 1, 30, 300):
        if not live + extra:
            continue
        pool = draft_tree_ref(graph, slots, live + extra, CONFIG)
        got, costs, penalties = node_costs(pool, slots)
        want, *others = node_costs_ref(pool, slots)
        assert torch.equal(got, want) and got.dtype == want.dtype
        assert [costs, penalties] == others and (penalties is not None) == paced
        for rows in {live, live + extra // 2, live + extra - 1, live + extra} - {live - 1}:
            assert_equal_fields(prune(pool, rows, got), prune_ref(pool, rows, want))


def test_prices_without_a_live_slot():
    slots = random_slots(random.Random(0), 4, live=False)
    pool = roots_ref(slots, 3)
    (got, *lists), (want, *others) = node_costs(pool, slots), node_costs_ref(pool, slots)
    assert torch.equal(got, want) and lists == others
