"""Class trees of slots with equal text: the loops are the reference, and the classes the texts."""

import random

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import CONFIG, odd_case, random_slots

from csd.engine.requests.slot_edits import join_classes
from csd.kernels.draft import draft_tree_ref
from csd.kernels.texts import cpu
from csd.kernels.texts.reference import merge_ref, part_ref, representatives, spread_ref, sum_cost
from csd.state.pool import COST_ONE, MAX_NODES, Pool
from csd.state.pool_builder import prune
from csd.state.verdict import empty_verdict


def in_classes(rng, slots):
    """Slots of a group become copies of one of them, noise and sample apart."""
    S = slots.count
    slots.leader.copy_(torch.arange(S))
    for s in range(S):
        mates = [t for t in range(s) if slots.group[t] == slots.group[s]]
        if mates and rng.random() < 0.7:
            other = rng.choice(mates)
            for name in ("context", "generated", "step", "leader", "max_new"):
                getattr(slots, name)[s] = getattr(slots, name)[other].clone()
    return slots


def random_case(seed):
    rng = random.Random(seed)
    config, graph, slots = odd_case(rng)
    in_classes(rng, slots)
    rows = int(slots.live.sum()) + rng.choice([0, 1, 7, 40, 200])
    return rng, slots, draft_tree_ref(graph.table(), slots, max(rows, 1), config)


def assert_same_pool(got, want):
    assert (got.texts is None) == (want.texts is None)
    if want.texts is not None:
        assert torch.equal(got.texts.row, want.texts.row)
        assert_same_pool(got.texts.rows, want.texts.rows)
        got, want = (Pool(**{n: getattr(x, n) for n in NAMES}) for x in (got, want))
    assert_equal_fields(got, want)


NAMES = [name for name in Pool.__match_args__ if name != "texts"]


@pytest.mark.parametrize("seed", range(40))
def test_the_loops_are_the_reference(seed):
    rng, slots, pool = random_case(seed)
    assert torch.equal(cpu.representatives(slots), representatives(slots))
    want = merge_ref(pool, slots)
    got = cpu.merge(pool, slots)
    assert_same_pool(got, want)
    drafted = want.depth > 0
    cost = torch.where(drafted, want.cost, -(1 << 24))
    some = prune(want, int((~drafted).sum()) + rng.randrange(1 + int(drafted.sum())), cost)
    for texts in (want, some):
        assert_same_pool(cpu.spread(texts, pool, slots), spread_ref(texts, pool, slots))


def paths(pool, s):
    """Tokens on the way to each node of a slot, with its row."""
    found = {}
    for m in range(int(pool.slot_start[s]), int(pool.slot_start[s] + pool.slot_nodes[s])):
        parent = int(pool.parent[m])
        above = () if parent < 0 else next(p for p, row in found.items() if row == parent)
        found[*above, int(pool.token[m])] = m
    return found


@pytest.mark.parametrize("seed", range(40, 60))
def test_a_class_has_the_union_of_its_members_trees(seed):
    _, slots, pool = random_case(seed)
    first, texts = representatives(slots).tolist(), merge_ref(pool, slots)
    every = spread_ref(texts, pool, slots)
    for s, leader in enumerate(first):
        assert (texts.slot_nodes[s] > 0) == (leader == s)
        if leader < 0:
            continue
        union, own = paths(texts, leader), paths(pool, s)
        if len(union) < MAX_NODES:
            assert own.keys() <= union.keys()
        copy = paths(every, s)
        assert copy.keys() == union.keys()
        for path, m in copy.items():
            t = union[path]
            # the row that computes the node has its text
            assert every.texts.row[m] == t
            assert (texts.position[t], texts.depth[t]) == (every.position[m], every.depth[m])
            assert torch.equal(texts.context[t], every.context[m])
            if path in own:
                assert every.cost[m] == pool.cost[own[path]]
            mine = [paths(pool, t) for t, f in enumerate(first) if f == leader]
            costs = [int(pool.cost[p[path]]) for p in mine if path in p]
            if len(path) > 1:
                assert texts.cost[t] == sum_cost(costs)
    rows = [int(r) for r in every.texts.row]
    assert {*rows} == {*range(texts.rows)}


def test_probabilities_of_members_add_up():
    assert sum_cost([3 * COST_ONE]) == 3 * COST_ONE
    assert sum_cost([2 * COST_ONE] * 2) == COST_ONE
    assert sum_cost([COST_ONE] * 4) == -COST_ONE


@pytest.mark.parametrize("seed", range(20))
def test_slots_part_when_their_tokens_do(seed):
    """Leaders are equal where the whole texts are, whatever slots are freed and filled."""
    rng = random.Random(seed)
    S = rng.choice([1, 2, 5, 9])
    slots = random_slots(rng, S, CONFIG, live=True)
    text, started = [None] * S, 0
    loops = random_slots(random.Random(seed), S, CONFIG, live=True)
    slots.live.fill_(False)
    for _ in range(12):
        filled = [s for s in range(S) if not slots.live[s] and rng.random() < 0.7]
        for s in filled:
            slots.live[s], slots.generated[s] = True, 0
            slots.group[s] = rng.randrange(min(S, 2))
            text[s] = [int(slots.group[s])]
        if filled:
            started += 1
            join_classes(slots, filled, slots.group.tolist())
        check_classes(slots, text)
        verdict = empty_verdict(S * 3, S, torch.device("cpu"))
        verdict.sample.copy_(torch.tensor([rng.randrange(2) for _ in range(S * 3)]))
        verdict.accept_row.fill_(-1)
        verdict.accept_count.zero_()
        for s in range(S):
            if slots.live[s]:
                count = rng.choice([1, 1, 2, 3])
                verdict.accept_count[s] = count
                verdict.accept_row[s, :count] = torch.arange(3 * s, 3 * s + count)
                text[s] += verdict.sample[3 * s : 3 * s + count].tolist()
                slots.generated[s] += count
                slots.live[s] = rng.random() < 0.85
        for name in ("live", "leader", "generated", "group"):
            getattr(loops, name).copy_(getattr(slots, name))
        part_ref(slots, verdict)
        cpu.part(loops, verdict)
        assert torch.equal(loops.leader, slots.leader)
        # a sample that is cancelled leaves its slot between steps
        for s in range(S):
            slots.live[s] &= rng.random() < 0.9
    assert started


def check_classes(slots, text):
    live = slots.live.nonzero()[:, 0].tolist()
    for s in live:
        for t in live:
            equal = slots.leader[s] == slots.leader[t]
            assert not equal or text[s] == text[t]
            # samples that began in one step stay in one class
            if len(text[s]) == len(text[t]) == 1:
                assert equal == (text[s] == text[t])
