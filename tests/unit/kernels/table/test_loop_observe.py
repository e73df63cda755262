"""The CPU's loops observe and insert a step exactly as the references do."""

from dataclasses import replace

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.observed_steps import HALF, ONE, no_path, random_step, verdict_of

from csd.graph.consensus import DeferredInserts
from csd.kernels.backends import loops as cpu_backend
from csd.kernels.ops import reference
from csd.kernels.table import graph_insert_ref
from csd.kernels.table.cpu import insert as inserting
from csd.kernels.table.cpu.insert import graph_insert
from csd.kernels.table.cpu.observe import insert_observed, observe
from csd.kernels.table.observe import observe_ref
from csd.kernels.table.rows import GROUP_SLOTS
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.pool_builder import roots
from csd.state.slots import Slots


@pytest.fixture
def no_reference(monkeypatch):
    """The loops alone insert."""
    monkeypatch.delattr(inserting, "graph_insert_ref")


@pytest.mark.parametrize("soft", [ONE, 54321], ids=["one", "odd"])
@pytest.mark.parametrize(
    ("M", "S", "N"), [(1, 1, 1), (7, 3, 3), (16, 5, 8), (40, 9, 5), (150, 90, 16)]
)
def test_rows_are_the_references(poison, no_reference, M, S, N, soft):
    """With 90 slots groups have more than tell them in one step."""
    config = GraphConfig(orders=(N,), soft_weight=soft, hard_weight=HALF - 1)
    for seed in range(5):
        step = random_step(M, S, N, seed)
        want = observe_ref(*step, config)
        assert_equal_fields(observe(*step, config), want)
        assert (want.row_total[:M] > 0).any() or M == 1


def test_slots_of_a_large_group_take_turns(no_reference):
    S = 2 * GROUP_SLOTS + 3
    slots = Slots.empty(S, 50, 20, 3)
    slots.group[:], slots.group_key[0] = 0, 7
    slots.live[:] = True
    path = no_path(S)
    path[:, 0] = torch.arange(S)
    # one has no path
    path[9] = -1
    verdict = verdict_of(torch.arange(S), torch.full((S, 1), -1), torch.zeros(S, 1), path)
    config, turns = GraphConfig(orders=(1, 2, 3)), 0
    for step in range(3):
        slots.step[:] = 10 + step
        got = observe(roots(slots, S), slots, verdict, config)
        assert_equal_fields(got, observe_ref(roots(slots, S), slots, verdict, config))
        assert 0 < (got.group_key[S:] >= 0).sum() <= GROUP_SLOTS
        turns = turns + (got.group_key[S:] >= 0).int()
    assert turns.tolist() == [1] * 9 + [0] + [1] * (S - 10)


def test_a_token_that_is_twice_among_the_top(no_reference):
    config = GraphConfig(orders=(3,))
    pool, slots, verdict = random_step(9, 4, 3, 1)
    verdict.top_token[:, 1] = verdict.top_token[:, 3] = verdict.sample
    assert_equal_fields(
        observe(pool, slots, verdict, config), observe_ref(pool, slots, verdict, config)
    )


@pytest.mark.parametrize("capacity", [1 << 12, 64], ids=["roomy", "evicting"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_steps_are_inserted_as_by_the_references(poison, no_reference, joined, capacity):
    config = GraphConfig(orders=(1, 2, 5), capacity=capacity, ways=8, successors=4)
    table, want = Table.empty(config), Table.empty(config)
    for seed in range(8):
        pool, slots, verdict = random_step(40, 9, 5, seed)
        slots.group_key[:3] = torch.tensor([seed // 3, 1 << 61, -1])
        pool.context %= 4
        seen = observe_ref(pool, slots, verdict, config)
        graph_insert_ref(want, *seen, slots.group_key, config.orders)
        if joined:
            insert_observed(table, pool, slots, verdict, config)
        else:
            rows = observe(pool, slots, verdict, config)
            graph_insert(table, *rows, slots.group_key, config.orders)
        assert_equal_fields(table, want)
    assert (want.dropped > 0) == (capacity == 64)


def test_what_waits_is_observed_together(no_reference):
    """Steps whose slots and groups are numbered on, and some of whose groups have gone."""
    config, found = GraphConfig(orders=(1, 2, 5), capacity=1 << 10, ways=8), []
    for ops in (reference(), cpu_backend()):
        later, table = DeferredInserts(), Table.empty(config)
        for seed in range(4):
            pool, slots, verdict = random_step(20, 9, 5, seed)
            slots.group_key[:3] = torch.tensor([5 + seed // 3, 1 << 61, 9])
            later.add(pool, slots, verdict)
        seen = later.observe(slots, config, ops)
        ops.graph_insert(table, *seen, slots.group_key, config.orders)
        found.append((seen, table))
    for got, want in zip(*found, strict=True):
        assert_equal_fields(got, want)


def test_an_operation_that_is_replaced_is_called():
    called = []

    def replaced(*args):
        called.append(len(args))
        return observe(*args)

    config = GraphConfig(orders=(1, 2, 5), capacity=1 << 10)
    table, want = Table.empty(config), Table.empty(config)
    step = random_step(20, 9, 5, 1)
    replace(cpu_backend(), observe=replaced).insert_observed(table, *step, config)
    cpu_backend().insert_observed(want, *step, config)
    assert called == [3 + 1]
    assert_equal_fields(table, want)


def test_a_pool_of_padding():
    config = GraphConfig(orders=(1, 3), capacity=64)
    pool, slots = Pool.empty(4, 2, 2, 3), Slots.empty(2, 9, 20, 3)
    verdict = verdict_of(
        torch.full((4,), -1), torch.full((4, 1), -1), torch.zeros(4, 1), no_path(2)
    )
    table, want = Table.empty(config), Table.empty(config)
    insert_observed(table, pool, slots, verdict, config)
    want.step += 1
    assert_equal_fields(table, want)


def test_tensors_that_are_elsewhere_are_refused():
    """Such as a table on a GPU, or what stands for a tensor while a step is traced."""
    config, step = GraphConfig(orders=(1, 3), capacity=64), random_step(9, 4, 3, 1)
    seen, table = observe(*step, config), Table.empty(config, "meta")
    pool = replace(step[0], slot=step[0].slot.to("meta"))
    with pytest.raises(TypeError, match=r"observe with kernels='cpu' takes .* on meta"):
        observe(pool, *step[1:], config)
    with pytest.raises(TypeError, match=r"graph_insert with kernels='cpu' takes .* on meta"):
        graph_insert(table, *seen, step[1].group_key, config.orders)
    with pytest.raises(TypeError, match="kernels='cpu' takes"):
        insert_observed(table, pool, *step[1:], config)


def test_tensors_of_other_dtypes_and_layouts(no_reference):
    config = GraphConfig(orders=(1, 3), capacity=64)
    pool, slots, verdict = random_step(9, 4, 3, 1)
    table, want = Table.empty(config), Table.empty(config)
    insert_observed(want, pool, slots, verdict, config)
    wide = torch.nn.functional.pad(verdict.accept_row, (0, 3))
    verdict = replace(verdict, sample=verdict.sample.long(), accept_row=wide[:, :-3])
    insert_observed(table, pool, slots, verdict, config)
    assert_equal_fields(table, want)
