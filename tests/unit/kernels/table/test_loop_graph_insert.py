"""The CPU's insert into the consensus graph equals the reference exactly."""

import random

import pytest
import torch
from collisions import same_hash
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.insert_cases import config, random_rows, tensors
from helpers.runs.fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st

from csd.graph.consensus import insert_prompt
from csd.kernels.table import graph_insert_ref
from csd.kernels.table.cpu import insert as module
from csd.kernels.table.cpu.insert import graph_insert
from csd.state.context_table import MAX_TOTAL, GraphConfig, Table


def run(conf, calls):
    """Insert `calls` of (rows, live groups) both ways, equal after each."""
    table, want = Table.empty(conf), Table.empty(conf)
    for rows, live in calls:
        for t, insert in ((want, graph_insert_ref), (table, graph_insert)):
            insert(t, *tensors(rows), torch.tensor(live), conf.orders)
        assert_equal_fields(table, want)
    return table


@pytest.fixture
def no_reference(monkeypatch):
    """The loop alone inserts."""
    monkeypatch.delattr(module, "graph_insert_ref")


@pytest.mark.parametrize(
    ("conf", "vocab", "rows"),
    [
        pytest.param(config(64, 16, (1, 2, 3)), 5, 16, id="roomy"),
        pytest.param(config(4, 4, (1, 2, 3)), 5, 16, id="evicting"),
        pytest.param(config(1, 4, (1, 2, 3)), 7, 23, id="one-bucket"),
        pytest.param(config(8, 1, (1, 3)), 3, 7, id="one-way"),
        pytest.param(config(2, 16, (2,), successors=1), 3, 33, id="one-order-one-successor"),
        pytest.param(config(16, 2, (1, 2, 3), successors=8), 2, 64, id="few-contexts"),
        pytest.param(config(2, 4, (1, 2, 3, 5, 8), successors=3), 2, 9, id="long-contexts"),
        pytest.param(config(1, 1, (1,)), 6, 5, id="one-entry"),
        pytest.param(config(512, 16, (1, 2, 3), 16), 50, 600, id="many-rows"),
    ],
)
def test_equals_the_reference(no_reference, conf, vocab, rows):
    rng = random.Random(rows)
    calls = []
    for step in range(12):
        # groups come and go
        live = [step // 4 + 1, -1, step // 3 + 20, -1]
        batch = random_rows(rng, rows, [g for g in live if g > 0], vocab, length=conf.context)
        calls.append((batch, live))
    table = run(conf, calls)
    assert (table.entry_group >= 0).any()


@st.composite
def inserts(draw):
    """Calls of rows of groups that come and go; few weights, so that they tie."""
    N, successors = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    orders = tuple(sorted(draw(st.sets(st.integers(1, N), min_size=1)) | {N}))
    ways = draw(st.sampled_from([1, 2, 4, 16]))
    conf = config(draw(st.sampled_from([1, 2, 8])), ways, orders, successors)
    U, groups = draw(st.integers(1, 4)), st.sampled_from([1, 2, 1 << 62])
    weight = st.sampled_from([0, 1, 2, 3, (1 << 27) - 1, 1 << 27])
    row = st.tuples(
        st.one_of(st.just(-1), groups),
        st.lists(st.integers(-1, 2), min_size=N, max_size=N),
        st.lists(st.tuples(st.integers(-1, 9), weight), min_size=U, max_size=U),
        st.integers(0, 1 << 29),
        st.integers(0, 63),
    )
    live = st.lists(st.one_of(st.just(-1), groups), min_size=1, max_size=3)
    calls = draw(st.lists(st.tuples(st.lists(row, min_size=1, max_size=9), live), max_size=6))
    # a call adds less than 2^30 to a context
    return conf, [([(*r[:3], r[3] // len(rows), r[4]) for r in rows], live) for rows, live in calls]


@examples(80, 3000)
@given(inserts())
def test_any_inserts(case):
    """Rows of groups that are not in flight among them, which the reference inserts."""
    run(*case)


@pytest.mark.parametrize("ways", [1, 2, 8])
@pytest.mark.parametrize("some", [False, True], ids=["all-groups", "some-groups"])
def test_contexts_of_one_hash_keep_the_first(no_reference, ways, some):
    rng, contexts = random.Random(1), same_hash(12)
    calls = []
    for _ in range(6):
        # all but the group and the context are of random rows
        rows = [(*rng.choice(contexts), *row[2:]) for row in random_rows(rng, 9)]
        calls.append((rows, list({given[0] for given in (rows if some else contexts)})))
    table = run(config(8, ways, (1, 3)), calls)
    code = table.entry_hash[table.entry_tokens[:, 2] >= 0]
    assert len(code.unique()) == 1
    # one that another's entry hides is new in each call
    assert len(code) > 1 or ways < 8 or some


@pytest.mark.parametrize("weight", [1, 3, 1 << 27])
def test_totals_are_halved(no_reference, weight):
    conf = config(orders=(1,))
    rare = [(1, [3], [(6, 1), (9, 0)], 1, 2)]
    common = [(1, [3], [(5, weight), (7, 1)], (1 << 30) - 2, 2)]
    table = run(conf, [(rare, [1])] + [(common, [1])] * 9)
    assert 0 < table.entry_total.max() <= MAX_TOTAL
    assert 6 not in table.succ_token


def test_halved_weights_that_tie_are_sorted_again(no_reference):
    conf = config(orders=(1,))
    first = [(1, [3], [(9, 5), (4, 4), (2, 4), (8, 3)], MAX_TOTAL - 1, 2)]
    calls = [(first, [1]), *[([(1, [3], [(1, 0)], n, 5)], [1]) for n in (2, 0)]]
    for count, want in ((2, [9, 2, 4, 8]), (3, [2, 4, 9, 8])):
        table = run(conf, calls[:count])
        entry = int((table.entry_group == 1).nonzero()[0])
        assert table.succ_token[entry].tolist() == want
        assert table.succ_weight[entry].tolist() == [2, 2, 2, 1]


def test_the_largest_call_does_not_overflow(no_reference):
    conf = config(orders=(1,))
    rows = [(1, [3], [(5, (1 << 16) - 1), (6, 1)], 1 << 16, s % 64) for s in range(8192)]
    table = run(conf, [(rows, [1])] * 4)
    assert (table.entry_total >= 0).all() and (table.succ_weight >= 0).all()


def test_many_successors_in_one_context(no_reference):
    """More than a context keeps, tokens up to the largest, and every source bit."""
    rng = random.Random(4)
    tokens = [0, (1 << 31) - 1, *rng.sample(range(1 << 31), 300)]
    rows = [
        (7, [3, 2, 1], [(rng.choice(tokens), rng.randrange(9)) for _ in range(9)], 200, s % 64)
        for s in range(500)
    ]
    rows += [(7, [3, 2, 1], [(5, 100)] * 9, 900, s) for s in range(64)]
    table = run(config(successors=16), [(rows, [7])] * 3)
    assert (table.succ_source == -1).any()


@pytest.mark.parametrize("orders", [(1, 2, 3), (1, 2, 3, 5, 8, 12, 16)], ids=str)
def test_prompts(no_reference, orders):
    conf = GraphConfig(orders=orders, capacity=1 << 12)
    generator = torch.Generator().manual_seed(0)
    table, want = Table.empty(conf), Table.empty(conf)
    for group in range(3):
        prompt = torch.randint(40, (700,), generator=generator, dtype=torch.int32)
        live = torch.tensor([group, max(group - 1, 0), -1])
        for t, insert in ((want, graph_insert_ref), (table, graph_insert)):
            insert_prompt(t, group, prompt, live, conf, insert)
        assert_equal_fields(table, want)


@pytest.mark.parametrize("rows", [[], [(-1, [1, 2, 3], [(1, 5)], 5, 0)]], ids=["none", "skipped"])
def test_nothing_to_insert(no_reference, rows):
    shaped = tensors(rows) if rows else [x[:0] for x in tensors([(0, [0] * 3, [(0, 0)], 0, 0)])]
    table, want = Table.empty(config()), Table.empty(config())
    graph_insert(table, *shaped, torch.tensor([1]), (1, 2, 3))
    graph_insert_ref(want, *shaped, torch.tensor([1]), (1, 2, 3))
    assert_equal_fields(table, want)
    assert table.step == 1


def test_slices_of_tensors(no_reference):
    conf = config()
    rows = tensors(random_rows(random.Random(3), 9))
    table, want = Table.empty(conf), Table.empty(conf)
    live = torch.tensor([1, 5])[:1]
    apart = [torch.stack([x, x - 1], 1)[:, 0] for x in rows]
    graph_insert(table, *apart, live, conf.orders)
    graph_insert_ref(want, *rows, live, conf.orders)
    assert_equal_fields(table, want)
