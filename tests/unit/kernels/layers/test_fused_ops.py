"""Launches that do the work of several operations: equal to the operations' references in turn."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import CONFIG, random_graph
from helpers.kernels.tree_cases import random_logits, trees
from helpers.targets import few, slow

from csd.kernels.ops import triton
from csd.kernels.table import graph_insert_ref, insert_observed_triton
from csd.kernels.table.observe import observe_ref
from csd.kernels.verify import decide_triton, verify_ref
from csd.kernels.verify.advance_slots import advance_slots_ref
from csd.kernels.verify.snapshot import snapshot_ref
from csd.kernels.verify.triton import launch

pytestmark = pytest.mark.compiled


@pytest.fixture
def few_splits(monkeypatch):
    monkeypatch.setattr(launch, "SPLITS", 2)


def decided(seed, count=7, rows=30):
    """Trees of which some are accepted and some slots end."""
    pool, slots = trees(seed, count, rows)
    slots.repetition_penalty[::2], slots.temperature[1::3] = 1.2, 0
    slots.stop_ids[:, 0] = 1
    return random_logits(pool.rows, 97, seed), pool, slots


@few(3)
@pytest.mark.parametrize(
    "with_snapshot", [(False, False), (True, True)], ids=["short", "with trees"]
)
@pytest.mark.parametrize(
    ("seed", "count", "rows"), [(0, 7, 30), (1, 1, 5), (2, 3, 150)], ids=["", "one", "rows"]
)
def test_a_verification_advances_slots_and_writes_the_snapshot(
    poison, few_splits, seed, count, rows, with_snapshot
):
    logits, pool, slots = decided(seed, count, rows)
    moved = deepcopy(slots)
    verdict = verify_ref(logits, pool, moved)
    advance_slots_ref(moved, verdict)
    want = snapshot_ref(pool, verdict, *with_snapshot)
    got, *found = decide_triton(logits, pool, slots, *with_snapshot)
    assert int(verdict.accept_count.max()) > 1 or count == 1
    # log-probabilities are sums: what is taken from them is equal, they themselves nearly
    for name in ("sample", "accept_row", "accept_count", "finish", "bad", "top_token"):
        assert torch.equal(getattr(got, name), getattr(verdict, name)), name
    assert torch.equal(found[0], want[0])
    floats = {name: getattr(got, name) for name in ("logprob", "raw_logprob", "top_prob")}
    exact = replace(verdict, **floats)
    assert torch.equal(found[1], snapshot_ref(pool, exact, *with_snapshot)[1])
    torch.testing.assert_close(found[1], want[1])
    torch.testing.assert_close(slots.logprobs, moved.logprobs)
    slots.logprobs, slots.raw_logprobs = moved.logprobs, moved.raw_logprobs
    assert_equal_fields(slots, moved)


def test_an_idle_slot_stays_as_it_is(poison, few_splits):
    logits, pool, slots = decided(3)
    pool.slot_nodes[2] = 0
    pool.slot[pool.slot == 2] = -1
    before = deepcopy(slots)
    _, ints, _ = decide_triton(logits, pool, slots, False, False)
    assert ints[2] == 0
    for name in ("generated", "step", "live", "context", "tokens", "seen"):
        assert torch.equal(getattr(slots, name)[2], getattr(before, name)[2]), name


@few(1)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_observed_is_inserted(poison, few_splits, seed):
    """Several steps into one table: contexts are found, made and evicted."""
    _, pool, slots = decided(seed)
    config = replace(CONFIG, soft_weight=1 << 15)
    table = random_graph(random.Random(seed)).table()
    want = table.map(torch.clone)
    for step in range(3):
        verdict = verify_ref(random_logits(pool.rows, 97, seed + step), pool, slots)
        seen = observe_ref(pool, slots, verdict, config)
        graph_insert_ref(want, *seen, slots.group_key, config.orders)
        insert_observed_triton(table, pool, slots, verdict, config)
        assert_equal_fields(table, want)
    assert (seen.group_key >= 0).any()


@slow
def test_an_operation_that_is_replaced_is_called(few_splits):
    ops, called = triton(), []

    def replaced(name):
        def call(*args):
            called.append(name)
            return getattr(ops, name)(*args)

        return replace(ops, **{name: call})

    logits, pool, slots = decided(0)
    config = CONFIG
    for name in ("verify", "advance_slots", "snapshot"):
        replaced(name).decide(logits, pool, deepcopy(slots), False, False)
    verdict = verify_ref(logits, pool, slots)
    table = random_graph(random.Random(0)).table()
    for name in ("observe", "graph_insert"):
        replaced(name).insert_observed(table, pool, slots, verdict, config)
    assert called == ["verify", "advance_slots", "snapshot", "observe", "graph_insert"]
