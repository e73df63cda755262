"""The drafting kernels, interpreted, against the reference."""

import random
from dataclasses import fields, replace
from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.draft_cases import (
    CONFIG,
    equal_slots,
    one_slot,
    parts_of_prior,
    random_graph,
    random_prior,
    random_slots,
    used_pool,
)
from helpers.targets import few, slow

from csd.kernels.draft import draft_tree, draft_tree_ref, draft_tree_triton
from csd.kernels.draft.triton.mixture import MAX_CHILDREN, likeliest
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_NODES, PROGRESS_PENALTY, SIBLING
from csd.state.pool import PRIOR as SOURCE

pytestmark = pytest.mark.compiled

module = import_module("csd.kernels.draft")


def both(table, slots, rows, config=CONFIG):
    want = draft_tree_ref(table, slots, rows, config)
    assert_equal_fields(draft_tree_triton(table, slots, rows, config), want)
    return want


@pytest.mark.parametrize(
    ("seed", "count", "extra", "changes"),
    [
        (0, 1, 1, {}),
        pytest.param(1, 1, 1, {}, marks=slow),
        (0, 3, 2, {"frontier": 1, "max_depth": 2}),
        pytest.param(1, 3, 2, {"frontier": 1, "max_depth": 2}, marks=slow),
        (0, 5, 0, {}),
        (0, 7, 23, {"frontier": 3, "beta": 1.0}),
        pytest.param(1, 7, 23, {"frontier": 3, "beta": 1.0}, marks=slow),
        # more slots than a block, among them every kind of slot
        (1, 19, 60, {"max_depth": 3}),
        # more rows than nodes
        (0, 4, 400, {"frontier": 8}),
        pytest.param(1, 4, 400, {"frontier": 8}, marks=slow),
        (0, 5, 40, {"min_prob": 0.01}),
        pytest.param(1, 5, 40, {"min_prob": 0.01}, marks=slow),
    ],
    ids=str,
)
def test_equals_the_reference(poison, seed, count, extra, changes):
    rng = random.Random(seed)
    config = replace(CONFIG, **changes)
    graph = random_graph(rng, config)
    slots = random_slots(rng, count, config)
    slots.live[rng.randrange(count)] = True
    both(graph.table(), slots, int(slots.live.sum()) + extra, config)


@pytest.mark.parametrize("group_penalty", [1, pytest.param(8192, marks=slow), 131072])
@pytest.mark.parametrize("count", [5, pytest.param(9, marks=slow)])
def test_group_penalties_equal_the_reference(poison, count, group_penalty):
    config = replace(CONFIG, group_penalty=group_penalty, max_depth=3)
    rng = random.Random(count)
    graph = random_graph(rng, config, groups=(11,))
    slots = random_slots(rng, count, config, groups=(11,))
    # one that is not live belongs to another group, and does not count
    slots.live[: count - 1], slots.live[-1], slots.group[-1] = True, False, 1
    slots.max_new[:], slots.progress_penalty[:], slots.step[:], slots.temperature[:3] = 99, 0, 1, 0
    slots.generated[:3], slots.step[1::3] = torch.tensor([40, 20, 5]), 2
    pool = both(graph.table(), slots, 3 * count, config)
    even = draft_tree_ref(graph.table(), slots, 3 * count, replace(config, group_penalty=0))
    assert (group_penalty == 1) == torch.equal(pool.token, even.token)
    slots.progress_penalty[:] = PROGRESS_PENALTY
    both(graph.table(), slots, 3 * count, config)
    slots.live[-1] = True
    both(graph.table(), slots, 3 * count, config)


@pytest.mark.parametrize(
    ("orders", "successors"), [((1,), 1), ((2, 5), 3), (tuple(range(1, 9)), 8)], ids=str
)
def test_any_orders_and_successors(poison, orders, successors):
    rng = random.Random(5)
    config = GraphConfig(orders=orders, capacity=256, ways=4, successors=successors, max_depth=3)
    graph = random_graph(rng, config, vocab=3)
    slots = random_slots(rng, 6, config, vocab=3, live=True)
    slots.max_new[:] = 99
    pool = both(graph.table(), slots, 50, config)
    assert pool.depth.max() > 1


@few(2)
@pytest.mark.parametrize(
    ("seed", "orders", "prior_orders", "successors"),
    [
        (0, (1, 2, 3), (1, 2, 3), 8),
        (1, (3,), (2, 3), 3),
        (2, (1, 2, 3), (1,), 16),
        (3, tuple(range(1, 8)), (1, 2, 3), 16),
    ],
    ids=str,
)
def test_a_prior_equals_the_reference(poison, seed, orders, prior_orders, successors):
    rng = random.Random(5000 + seed)
    config = replace(
        CONFIG,
        orders=orders,
        prior_orders=prior_orders,
        successors=successors,
        max_depth=4,
        frontier=rng.choice([3, 8]),
    )
    graph = random_graph(rng, config, tokens=20)
    graph.prior = random_prior(rng, vocab=9)
    slots = random_slots(rng, 5, config, vocab=9, live=True)
    slots.max_new[:] = 99
    pool = both(graph.table(), slots, 60, config)
    assert (pool.source == SOURCE).any() and (pool.source == SIBLING).any()


def test_parts_of_a_prior_equal_the_reference(poison):
    rng = random.Random(7000)
    graph = random_graph(rng, vocab=9, tokens=20)
    slots = random_slots(rng, 5, vocab=9, live=True)
    slots.prior_part[:2] = torch.tensor([2, 1])
    table = graph.table()
    table.prior, _ = parts_of_prior(rng, vocab=9)
    pool = both(table, slots, 60, replace(CONFIG, max_depth=4))
    assert (pool.source == SOURCE).any()


def test_ties_go_by_slot_depth_token_and_parent(poison):
    rng = random.Random(0)
    graph = random_graph(rng, weights=[4096], vocab=4, groups=(11,))
    slots = equal_slots(rng, 6, vocab=4, groups=(11,))
    for rows in (10, 40):
        pool = both(graph.table(), slots, rows, replace(CONFIG, max_depth=4))
    assert len(pool.cost.unique()) < rows / 2


def test_the_64th_node_is_the_sign_bit(poison):
    graph = random_graph(random.Random(3), groups=(11,))
    pool = both(graph.table(), one_slot(), 200)
    assert pool.slot_nodes[0] == MAX_NODES and pool.ancestors[63] < 0


@pytest.mark.parametrize("case", ["empty-table", "no-live-slot"])
def test_roots_alone(poison, case):
    graph = random_graph(random.Random(1))
    table = Table.empty(CONFIG) if case == "empty-table" else graph.table()
    slots = random_slots(random.Random(2), 5, live=case != "no-live-slot")
    pool = both(table, slots, 12)
    assert pool.slot_nodes.sum() == (0 if case == "no-live-slot" else 5)


@pytest.mark.parametrize("nodes", [0, pytest.param(1, marks=slow), 9])
def test_fewer_nodes_than_rows(poison, nodes):
    table = random_graph(random.Random(3)).table()
    slots = random_slots(random.Random(2), 5, live=True)
    slots.max_new[:] = 99
    want = draft_tree_ref(table, slots, 40, CONFIG, nodes=nodes)
    assert_equal_fields(draft_tree_triton(table, slots, 40, CONFIG, nodes=nodes), want)
    assert int((want.depth > 0).sum()) == nodes
    tight = draft_tree_ref(table, slots, 5 + nodes, CONFIG)
    assert torch.equal(want.token[: 5 + nodes], tight.token)


def test_end_tokens_are_not_drafted(poison):
    graph = random_graph(random.Random(3), groups=(11,))
    slots = one_slot()
    slots.stop_ids[0, 15] = 4
    pool = both(graph.table(), slots, 40)
    assert pool.slot_nodes[0] > 10 and not (pool.token[1:] == 4).any()


def test_out_is_overwritten_whole():
    graph = random_graph(random.Random(6))
    slots = random_slots(random.Random(7), 5)
    out = used_pool(40, 5)
    assert draft_tree_triton(graph.table(), slots, 40, CONFIG, out=out) is out
    assert_equal_fields(out, draft_tree_ref(graph.table(), slots, 40, CONFIG))


def table_tensors(table):
    return [
        getattr(table, f.name) for f in fields(table) if f.name not in ("ways", "prior", "parts")
    ]


@pytest.mark.parametrize("prior", [False, True])
def test_operator_drafts_as_the_reference(prior):
    graph, slots = random_graph(random.Random(1)), random_slots(random.Random(2), 5)
    graph.prior = random_prior(random.Random(2)) if prior else None
    table = graph.table()
    assert_equal_fields(
        draft_tree(table, slots, 20, CONFIG), draft_tree_ref(table, slots, 20, CONFIG)
    )


def test_operator():
    table = random_graph(random.Random(1)).table()
    slots = random_slots(random.Random(2), 5)
    numbers = [getattr(CONFIG, name) for name in module._CONFIG]
    sizes = 20, CONFIG.ways, 4, 1, list(CONFIG.orders), [1, 2]
    for prior in ([], table_tensors(random_prior(random.Random(2)).table())):
        args = module._draft_tree.pack(table, slots, prior, *sizes, *numbers, 9)
        torch.library.opcheck(torch.ops.csd.draft_tree.default, tuple(args))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"config": replace(CONFIG, orders=(1, 9))}, "config.orders must be at most 3"),
        ({"config": replace(CONFIG, successors=4)}, "successors 8, as table has"),
        (
            {
                "table": replace(Table.empty(CONFIG), prior=Table.empty(CONFIG)),
                "config": replace(CONFIG, prior_orders=(1, 4)),
            },
            r"config.prior_orders must be at most 3, got \(1, 4\)",
        ),
        (
            {
                "table": replace(
                    Table.empty(CONFIG), prior=Table.empty(replace(CONFIG, successors=32))
                )
            },
            "table.prior must have at most 16 successors, got 32",
        ),
        (
            {"slots": random_slots(random.Random(2), 5, replace(CONFIG, orders=(1, 2)))},
            r"slots.context must have shape \(5, 3\), got \(5, 2\)",
        ),
    ],
)
def test_bad_input(change, message):
    args = {
        "table": Table.empty(CONFIG),
        "slots": random_slots(random.Random(2), 5),
        "rows": 9,
        "config": CONFIG,
    }
    with pytest.raises(ValueError, match=message):
        draft_tree(**args | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frontier": 9}, "frontier must be from 1 to 8, got 9"),
        ({"successors": 33}, "successors must be from 1 to 32 with 3 orders, got 33"),
        ({"settle": -1}, "settle must be from 0 to 32767, got -1"),
        ({"group_penalty": 131073}, "group_penalty must be from 0 to 131072, got 131073"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@triton.jit
def likeliest_kernel(token_ptr, mass_ptr, out_ptr, O: tl.constexpr):
    at = tl.arange(0, O)[None, :, None]
    mass = tl.load(mass_ptr + at)
    token, q, _source = likeliest(tl.load(token_ptr + at), mass, 0 * mass + 1, 17, 17)
    k = tl.arange(0, MAX_CHILDREN)[None, :]
    tl.store(out_ptr + k, tl.where(q > 0, token, -1))
    tl.store(out_ptr + MAX_CHILDREN + k, q)


def test_a_token_counts_in_all_of_sixteen_orders_and_the_group():
    token = torch.full((32,), -1, dtype=torch.int32)
    mass = torch.zeros(32, dtype=torch.int32)
    token[:17], mass[:17] = 5, torch.arange(100, 117)
    out = torch.full((2, MAX_CHILDREN.value), -7, dtype=torch.int32)
    likeliest_kernel[(1,)](token, mass, out, O=32)
    assert out[0].tolist() == [5] + [-1] * (MAX_CHILDREN.value - 1)
    assert out[1].tolist() == [sum(range(100, 117))] + [0] * (MAX_CHILDREN.value - 1)
