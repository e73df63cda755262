"""The insertion kernels, interpreted, against the reference."""

import random

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.insert_cases import config, random_rows, tensors

from csd.graph.consensus import insert_prompt
from csd.kernels.table import (
    _graph_insert,
    graph_insert,
    graph_insert_ref,
    graph_insert_triton,
    lookup,
)
from csd.state.context_table import MAX_TOTAL, Table

pytestmark = pytest.mark.compiled


def run(conf, calls):
    """Insert `calls` of (rows, live groups) both ways, equal after each."""
    table, want = Table.empty(conf), Table.empty(conf)
    for rows, live in calls:
        for t, insert in ((want, graph_insert_ref), (table, graph_insert_triton)):
            insert(t, *tensors(rows), torch.tensor(live), conf.orders)
        assert_equal_fields(table, want)
    return table


@pytest.mark.parametrize(
    ("conf", "vocab", "rows", "steps"),
    [
        pytest.param(config(64, 16, (1, 2, 3)), 5, 11, 2, id="roomy"),
        pytest.param(config(4, 4, (1, 2, 3)), 5, 9, 3, id="evicting"),
        pytest.param(config(1, 4, (1, 2, 3)), 7, 23, 3, id="one-bucket"),
        pytest.param(config(8, 1, (1, 3)), 3, 7, 3, id="one-way"),
        pytest.param(config(2, 16, (2,), successors=1), 3, 33, 2, id="one-order-one-successor"),
        pytest.param(config(16, 2, (1, 2, 3), successors=8), 2, 64, 2, id="few-contexts"),
        pytest.param(config(2, 4, (1, 2, 3, 5, 8), successors=3), 2, 9, 2, id="long-contexts"),
        pytest.param(config(1, 1, (1,)), 6, 5, 3, id="one-entry"),
    ],
)
def test_equals_the_reference(poison, conf, vocab, rows, steps):
    rng = random.Random(rows)
    calls = []
    for step in range(steps):
        # groups come and go
        live = [step // 2 + 1, -1, step + 20, -1]
        batch = random_rows(rng, rows, [g for g in live if g > 0], vocab, length=conf.context)
        calls.append((batch, live))
    table = run(conf, calls)
    assert (table.entry_group >= 0).any()


def test_contexts_of_one_hash_keep_the_first(poison, monkeypatch):
    # contexts of equal sums collide, of any order and group
    monkeypatch.setattr(lookup, "TOKEN_FACTORS", lookup.TOKEN_FACTORS * 0 + 1)
    monkeypatch.setattr(lookup, "GROUP_FACTOR", lookup.GROUP_FACTOR * 0 + 1)
    rng = random.Random(1)
    table = run(config(2, 8), [(random_rows(rng, 9, [1, 2]), [1, 2]) for _ in range(4)])
    used = table.entry_hash[table.entry_group >= 0]
    assert 2 < len(used.unique()) < len(used)


def test_totals_are_halved(poison):
    conf = config(orders=(1,))
    rare = [(1, [3], [(6, 1)], 1, 2)]
    common = [(1, [3], [(5, 1 << 29), (7, 9)], (1 << 30) - 2, 2)]
    table = run(conf, [(rare, [1])] + [(common, [1])] * 3)
    assert 0 < table.entry_total.max() <= MAX_TOTAL
    assert 6 not in table.succ_token and 5 in table.succ_token


def test_many_samples_in_one_context(poison):
    """More successors than a program merges at once, and every source bit."""
    rows = [(7, [3, 2, 1], [(5, 100 + s), (s % 40 + 6, 40)], 200, s) for s in range(63)]
    table = run(config(), [(rows, [7])] * 2)
    assert (table.succ_source == (1 << 63) - 1).sum() == 3


def test_prompts(poison):
    conf = config(8, 4, prompt_weight=10)
    prompt = torch.tensor([1, 2, 1, 2, 3, 1, 2, 1, 1, 4, 4, 4], dtype=torch.int32)
    table, want = Table.empty(conf), Table.empty(conf)
    for t, insert in ((want, graph_insert_ref), (table, graph_insert_triton)):
        insert_prompt(t, 5, prompt, torch.tensor([5]), conf, insert)
    assert_equal_fields(table, want)


@pytest.mark.parametrize("rows", [[], [(-1, [1, 2, 3], [(1, 5)], 5, 0)]], ids=["none", "skipped"])
def test_nothing_to_insert(poison, rows):
    shaped = tensors(rows) if rows else [x[:0] for x in tensors([(0, [0] * 3, [(0, 0)], 0, 0)])]
    table, want = Table.empty(config()), Table.empty(config())
    graph_insert_triton(table, *shaped, torch.tensor([1]), (1, 2, 3))
    graph_insert_ref(want, *shaped, torch.tensor([1]), (1, 2, 3))
    assert_equal_fields(table, want)
    assert table.step == 1


def case(conf):
    return tensors(random_rows(random.Random(3), 6, [1], length=conf.context))


def test_graph_insert_op():
    conf = config(2, 4)
    table, want = Table.empty(conf), Table.empty(conf)
    live = torch.tensor([1])
    graph_insert(table, *case(conf), live, conf.orders)
    graph_insert_ref(want, *case(conf), live, conf.orders)
    assert_equal_fields(table, want)
    args = _graph_insert.pack(table, table.ways, *case(conf), live, list(conf.orders))
    torch.library.opcheck(torch.ops.csd.graph_insert.default, tuple(args))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(6, 4).int(), r"context must have shape \(6, 3\), got \(6, 4\)"),
        (2, torch.zeros(5, 5).int(), r"succ_token must have shape \(6, 5\), got \(5, 5\)"),
        (3, torch.zeros(6, 5), "succ_weight must be torch.int32, got torch.float32"),
        (0, torch.zeros(6).int(), "group_key must be torch.int64, got torch.int32"),
    ],
)
def test_graph_insert_errors(place, value, message):
    rows = list(case(config()))
    rows[place] = value
    with pytest.raises(ValueError, match=message):
        graph_insert(Table.empty(config()), *rows, torch.tensor([1]), (1, 2, 3))


@pytest.mark.parametrize("orders", [(), (0, 1), (1, 4)], ids=str)
def test_impossible_orders_are_refused(orders):
    with pytest.raises(ValueError, match="orders must lie in 1 to 3"):
        graph_insert(Table.empty(config()), *case(config()), torch.tensor([1]), orders)
