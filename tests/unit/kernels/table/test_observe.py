"""Rows for the graph: written out by hand, and the kernel against the reference."""

from importlib import import_module

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.observed_steps import HALF, ONE, no_path, random_step, verdict_of
from torch.library import opcheck

from csd.kernels.table.observe import observe, observe_ref, observe_triton
from csd.kernels.table.rows import GROUP_SLOTS, SUCCESSORS
from csd.state.context_table import ANY, GraphConfig
from csd.state.pool_builder import roots
from csd.state.slots import Slots

pytestmark = pytest.mark.compiled

module = import_module("csd.kernels.table.observe")
kernels = import_module("csd.kernels.table.triton.observe")


def test_nodes_show_the_target_and_kept_ones_what_was_drawn():
    config = GraphConfig(orders=(1, 2, 3), soft_weight=ONE, hard_weight=HALF)
    slots = Slots.empty(3, 10, 20, 3)
    slots.live[:2] = True
    slots.group[:2] = torch.tensor([1, 0])
    slots.group_key[:2] = torch.tensor([70, 80])
    slots.sample[:2] = torch.tensor([64, 5])
    slots.context[:2] = torch.tensor([[1, 2, 3], [4, 5, -1]])
    pool = roots(slots, 4)
    # rows: root of slot 1 (group 0), root of slot 0 (group 1), a rejected node of it, padding
    pool.slot[2], pool.depth[2], pool.token[2] = 0, 1, 9
    pool.context[2] = torch.tensor([9, 1, 2])
    path = no_path(3)
    path[1, 0], path[0, 0] = 0, 1
    verdict = verdict_of(
        torch.tensor([6, 5, 2, -1]),
        torch.tensor([[3, 6], [7, 8], [2, -1], [-1, -1]]),
        torch.tensor([[0.5, 0.25], [0.75, 1e-6], [1.0, 0.0], [0.0, 0.0]]),
        path,
    )
    got = observe_ref(pool, slots, verdict, config)
    # the last three rows tell the groups as a whole what slots 0, 1 and 2 have drawn
    assert got.group_key.tolist() == [70, 80, 80, -1, 80, 70, -1]
    group_context = torch.tensor([[ANY, -1, -1]] * 3)
    assert torch.equal(got.context, torch.cat([pool.context, group_context]))
    assert got.succ_token[4:6, 0].tolist() == [5, 6]
    assert got.succ_weight[4:].sum(1).tolist() == got.row_total[4:].tolist() == [ONE, ONE, 0]
    assert got.source_bit[[0, 1, 2, 4, 5]].tolist() == [5, 2, 2, 2, 5]
    token, weight = got.succ_token[:4], got.succ_weight[:4]
    # a drawn token among the top 8 gains weight there, another one comes ninth
    assert torch.where(weight > 0, token, -1)[:, [0, 1, 8]].tolist() == [
        [3, 6, -1],
        [7, -1, 5],
        [2, -1, -1],
        [-1, -1, -1],
    ]
    assert weight[:, [0, 1, 8]].tolist() == [
        [ONE // 2, ONE // 4 + HALF, 0],
        [ONE * 3 // 4, 0, HALF],
        [ONE, 0, 0],
        [0, 0, 0],
    ]
    assert got.row_total.tolist()[:3] == [ONE + HALF, ONE + HALF, ONE]


def test_rows_without_probabilities_show_what_was_drawn_alone():
    config = GraphConfig(orders=(1, 2, 3), soft_weight=1 << 14, hard_weight=HALF)
    slots = Slots.empty(2, 10, 20, 3)
    slots.live[:], slots.group[:], slots.group_key[0] = True, 0, 70
    path = no_path(2)
    path[0, 0] = 0
    verdict = verdict_of(torch.tensor([4, 4]), torch.full((2, 1), -1), torch.zeros(2, 1), path)
    got = observe_ref(roots(slots, 2), slots, verdict, config)
    assert got.group_key.tolist() == [70, -1, 70, -1]
    assert got.succ_token[0, 8] == 4
    # as much as a whole distribution
    assert got.succ_weight[0].tolist() == [0] * 8 + [1 << 14]
    assert got.row_total[0] == 1 << 14


def test_a_path_longer_than_a_row_has_its_first_tokens():
    slots = Slots.empty(1, 50, 20, 8)
    slots.live[:], slots.group[:], slots.group_key[:] = True, 0, 7
    pool = roots(slots, 12)
    pool.slot[:], pool.depth[:] = 0, torch.arange(12)
    path = no_path(1)
    path[0, :11] = torch.arange(11)
    verdict = verdict_of(torch.arange(20, 32), torch.full((12, 1), -1), torch.zeros(12, 1), path)
    got = observe_ref(pool, slots, verdict, GraphConfig())
    assert got.succ_token[12].tolist() == list(range(20, 20 + SUCCESSORS))
    assert got.succ_weight[12].tolist() == [ONE] * SUCCESSORS
    assert got.row_total[12] == SUCCESSORS * ONE
    assert (got.row_total[:12] > 0).tolist() == [True] * 11 + [False]


def test_many_slots_of_a_group_take_turns():
    S, few = 2 * GROUP_SLOTS + 3, 5
    slots = Slots.empty(S + few, 50, 20, 3)
    slots.group[:S], slots.group[S:] = 0, 1
    slots.group_key[:2] = torch.tensor([7, 9])
    slots.live[:] = True
    pool = roots(slots, S + few)
    path = no_path(S + few)
    path[:, 0] = torch.arange(S + few)
    verdict = verdict_of(
        torch.arange(S + few), torch.full((S + few, 1), -1), torch.zeros(S + few, 1), path
    )
    turns = torch.zeros(S, dtype=torch.int32)
    for step in range(3):
        slots.step[:] = 10 + step
        got = observe_ref(pool, slots, verdict, GraphConfig(orders=(1, 2, 3)))
        # of nodes all are told in every step, and a small group hears of all its slots
        assert got.group_key[: S + few].tolist() == [7] * S + [9] * few
        assert got.group_key[2 * S + few :].tolist() == [9] * few
        rows = got.group_key[S + few : 2 * S + few] == 7
        assert rows.sum() <= GROUP_SLOTS
        assert torch.equal(got.row_total[S + few : 2 * S + few] > 0, rows)
        turns += rows
    assert turns.tolist() == [1] * S


@pytest.mark.parametrize("soft", [ONE, 54321], ids=["one", "odd"])
@pytest.mark.parametrize(("M", "S", "N"), [(1, 1, 1), (7, 3, 3), (16, 5, 8), (40, 9, 5)])
def test_the_kernel_writes_what_the_reference_does(poison, monkeypatch, M, S, N, soft):
    config = GraphConfig(orders=(N,), soft_weight=soft, hard_weight=HALF - 1)
    for seed in range(3):
        step = random_step(M, S, N, seed)
        for file in (module, kernels):
            monkeypatch.setattr(file, "GROUP_SLOTS", (16, 1, 2)[seed])
        want = observe_ref(*step, config)
        assert_equal_fields(observe_triton(*step, config), want)
        assert (want.row_total[:M] > 0).any() or M == 1


def test_operator():
    config = GraphConfig(orders=(1, 2, 3))
    pool, slots, verdict = random_step(9, 4, 3, 1)
    want = observe_ref(pool, slots, verdict, config)
    assert_equal_fields(observe(pool, slots, verdict, config), want)
    args = module._observe.pack(pool, slots, verdict, ONE, HALF)
    opcheck(torch.ops.csd.observe.default, tuple(args))


@pytest.mark.parametrize("name", ["sample", "top_token", "top_prob", "accept_row"])
def test_errors_name_the_argument(name):
    pool, slots, verdict = random_step(9, 4, 3, 1)
    x = getattr(verdict, name)
    setattr(verdict, name, x[:-1])
    with pytest.raises(ValueError, match=rf"verdict.{name} must have shape .* got"):
        observe(pool, slots, verdict, GraphConfig())
    setattr(verdict, name, x.short())
    with pytest.raises(ValueError, match=rf"verdict.{name} must be .* got torch.int16"):
        observe(pool, slots, verdict, GraphConfig())
