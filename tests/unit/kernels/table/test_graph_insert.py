"""The reference's insert against the plain model of `tests/helpers/oracles/graph_model.py`."""

import random

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.insert_cases import config, random_rows, tensors
from helpers.oracles.graph_model import Graph, context_hash

from csd.graph import consensus
from csd.graph.consensus import ConsensusGraph, insert_prompt
from csd.kernels.ops import reference
from csd.kernels.table import graph_insert_ref
from csd.kernels.table import reference as ref
from csd.state.context_table import ANY, MAX_TOTAL, PROMPT_BIT, GraphConfig, Table
from csd.state.slots import Slots


def run(conf, calls, code=context_hash):
    """Insert `calls` of (rows, live groups) into table and model, equal after each."""
    table, graph = Table.empty(conf), Graph(conf, code)
    for rows, live in calls:
        graph_insert_ref(table, *tensors(rows), torch.tensor(live), conf.orders)
        graph.insert(rows, live)
        assert_equal_fields(table, graph.table())
    return table, graph


@pytest.mark.parametrize(
    ("conf", "vocab", "rows"),
    [
        pytest.param(config(64, 16, (1, 2, 3)), 5, 16, id="roomy"),
        pytest.param(config(4, 4, (1, 2, 3)), 5, 16, id="evicting"),
        pytest.param(config(1, 4, (1, 2, 3)), 7, 23, id="one-bucket"),
        pytest.param(config(8, 1, (1, 3)), 3, 7, id="one-way"),
        pytest.param(config(2, 16, (2,), successors=1), 3, 33, id="one-order-one-successor"),
        pytest.param(config(16, 2, (1, 2, 3), successors=8), 2, 64, id="few-contexts"),
        pytest.param(config(1, 1, (1,)), 6, 5, id="one-entry"),
    ],
)
def test_equals_the_model(conf, vocab, rows):
    rng = random.Random(rows)
    calls = []
    for step in range(12):
        # groups come and go
        live = [step // 4 + 1, -1, step // 3 + 20, -1]
        batch = random_rows(rng, rows, [g for g in live if g > 0], vocab, length=conf.context)
        calls.append((batch, live))
    run(conf, calls)


def test_a_first_step_puts_all_samples_into_one_context():
    rows = [(7, [3, 2, 1], [(5, 100 + s), (s, 40)], 200, s) for s in range(16)]
    _, graph = run(config(), [(rows, [7])])
    entry = graph.entries[graph.find(7, (3, 2, 1), context_hash(7, (3, 2, 1)))]
    # token 5 comes from all and from the sample that drew it
    assert entry.successors[0] == (5, sum(range(100, 116)) + 40, (1 << 16) - 1)
    # the others weigh the same: smaller tokens stay
    assert [t for t, _, _ in entry.successors[1:]] == [0, 1, 2]
    assert entry.total == 16 * 200


@pytest.mark.parametrize("weight", [1, 3, 1 << 27])
def test_totals_are_halved(weight):
    conf = config(orders=(1,))
    rows = [(1, [3], [(5, weight), (6, 1)], 1 << 28, 2)]
    table, graph = run(conf, [(rows, [1])] * 9)
    assert 0 < table.entry_total.max() <= MAX_TOTAL
    first = graph.entries[graph.find(1, (3,), context_hash(1, (3,)))].successors[0]
    assert first[1] < 9 * weight


def test_successors_leave_when_halved_to_nothing():
    conf = config(orders=(1,))
    rare = [(1, [3], [(6, 1)], 1, 2)]
    common = [(1, [3], [(5, 1 << 20)], 1 << 29, 2)]
    table, _ = run(conf, [(rare, [1])] + [(common, [1])] * 3)
    assert 6 not in table.succ_token
    assert 5 in table.succ_token


def test_the_largest_call_does_not_overflow():
    conf = config(orders=(1,))
    rows = [(1, [3], [(5, (1 << 16) - 1), (6, 1)], 1 << 16, s % 62) for s in range(8192)]
    table, _ = run(conf, [(rows, [1])] * 4)
    assert (table.entry_total >= 0).all() and (table.succ_weight >= 0).all()


def test_a_freed_groups_entries_are_taken_first():
    conf = config(1, 8, (1,))
    old = [(1, [t], [(0, 9)], 9, 0) for t in range(4)]
    heavy = [(2, [t], [(0, 1)], 1, 0) for t in range(4)]
    new = [(3, [t], [(0, 5)], 5, 0) for t in range(4)]
    table, _ = run(conf, [(old, [1]), (heavy, [1, 2]), (new, [2, 3])])
    # group 1's four entries are gone, though group 2's are lighter
    assert table.entry_group.tolist() == [3] * 4 + [2] * 4
    assert table.dropped == 0


def test_live_entries_go_lightest_first_then_oldest():
    conf = config(1, 4, (1,))
    seed = [[(1, [t], [(0, 1)], w, 0)] for t, w in ((0, 7), (1, 5), (2, 5), (3, 6))]
    more = [(1, [t], [(0, 1)], 1, 0) for t in (10, 11, 12)]
    table, _ = run(conf, [(x, [1]) for x in seed] + [(more, [1])])
    assert table.entry_tokens[:, 0].tolist() == [0, 10, 11, 12]


def test_what_a_call_touches_is_not_evicted_by_it():
    conf = config(1, 4, (1,))
    first = [(1, [t], [(0, 1)], 1, 0) for t in range(4)]
    # the lightest entries are updated in the same call that needs room
    second = [(1, [t], [(0, 1)], 1, 0) for t in (0, 1, 10, 11, 12)]
    table, _ = run(conf, [(first, [1]), (second, [1])])
    assert table.entry_tokens[:, 0].tolist() == [0, 1, 10, 11]
    assert table.dropped == 1


def test_contexts_of_one_hash_keep_the_first(monkeypatch):
    def few(group, tokens):
        return context_hash(group, tokens) & 3

    def few_codes(*args):
        return whole(*args) & 3

    whole = ref.hash_contexts
    monkeypatch.setattr(ref, "hash_contexts", few_codes)
    rng = random.Random(1)
    calls = [(random_rows(rng, 9, [1, 2]), [1, 2]) for _ in range(6)]
    table, _ = run(config(2, 8), calls, few)
    # many more contexts were there than the four hashes
    assert 4 < (table.entry_group >= 0).sum() <= 4 * len(calls)


def test_the_order_of_rows_does_not_matter():
    conf = config(256, 16)
    rng = random.Random(5)
    rows = random_rows(rng, 60, [1, 2], vocab=3)

    def content(rows):
        graph = run(conf, [(rows, [1, 2])])[1]
        return {(e.group, e.tokens): (e.total, e.successors) for e in graph.entries if e}

    want = content(rows)
    rng.shuffle(rows)
    assert content(rows) == want


@pytest.mark.parametrize("rows", [[], [(-1, [1, 2, 3], [(1, 5)], 5, 0)]], ids=["none", "skipped"])
def test_nothing_to_insert(rows):
    table = Table.empty(config())
    shaped = tensors(rows) if rows else tensors([(0, [0] * 3, [(0, 0)], 0, 0)])
    shaped = shaped if rows else tuple(x[:0] for x in shaped)
    graph_insert_ref(table, *shaped, torch.tensor([1]), (1, 2, 3))
    want = Table.empty(config())
    assert table.step == 1
    assert torch.equal(table.entry_group, want.entry_group)
    assert torch.equal(table.succ_weight, want.succ_weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"orders": ()}, "orders"),
        ({"orders": (2, 1)}, "orders"),
        ({"orders": (0, 1)}, "orders"),
        ({"orders": (1, 17)}, "orders"),
        ({"capacity": 1000}, "capacity must be a power of two, got 1000"),
        ({"capacity": 1 << 27}, r"capacity must be below 2\^31 over the 16 places"),
        ({"ways": 32}, "ways"),
        ({"uncoupled": 1.5}, r"uncoupled must lie in \[0, 1\], got 1.5"),
    ],
)
def test_impossible_configs_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        GraphConfig(**options)


@pytest.mark.parametrize("length", [1, 2, 9], ids=["one-token", "two-tokens", "nine-tokens"])
@pytest.mark.parametrize("piece", [3, 4096], ids=["pieces", "whole"])
def test_prompts_count_their_ngrams(monkeypatch, length, piece):
    monkeypatch.setattr(consensus, "PIECE", piece)
    conf = config(64, 16, prompt_weight=10)
    prompt = [1, 2, 1, 2, 3, 1, 2, 1, 1][:length]
    table = Table.empty(conf)
    insert_prompt(table, 5, torch.tensor(prompt, dtype=torch.int32), torch.tensor([5]), conf)
    # after anything: what the group says
    counts = {}
    for i in range(1, length):
        counts.setdefault((ANY,), {}).setdefault(prompt[i], []).append(10)
        for n in conf.orders:
            if n <= i:
                context = tuple(reversed(prompt[i - n : i]))
                counts.setdefault(context, {}).setdefault(prompt[i], []).append(10)
    used = (table.entry_group == 5).nonzero()[:, 0].tolist()
    seen = {}
    for i in used:
        context = tuple(t for t in table.entry_tokens[i].tolist() if t >= 0)
        pairs = zip(table.succ_token[i].tolist(), table.succ_weight[i].tolist(), strict=True)
        seen[context] = {t: w for t, w in pairs if t >= 0}
        assert table.entry_total[i] == sum(seen[context].values())
        assert set(table.succ_source[i].tolist()) <= {0, 1 << PROMPT_BIT}
    assert seen == {c: {t: sum(w) for t, w in s.items()} for c, s in counts.items()}


@pytest.mark.parametrize("buckets", [64, 2], ids=["roomy", "evicting"])
def test_the_graph_of_a_prompt_is_the_same_for_every_chunk_size(monkeypatch, buckets):
    monkeypatch.setattr(consensus, "PIECE", 5)
    conf = config(buckets, 4, orders=(1, 2, 4), successors=3)
    rng = random.Random(1)
    slots = Slots.empty(2, 8, 64, conf.context)
    slots.group_key[0] = 5
    for length in (1, 2, 5, 6, 11, 43):
        prompt = [rng.randrange(4) for _ in range(length)]
        want = Table.empty(conf)
        insert_prompt(want, 5, torch.tensor(prompt, dtype=torch.int32), slots.group_key, conf)
        for chunk in (1, 3, 4, 5, 7, 100):
            graph = ConsensusGraph(reference(), torch.device("cpu"), conf)
            # all but the last token is read; that one is the samples' first root
            read = [*range(chunk, length - 1, chunk), length - 1, length]
            heard, pieces = 0, []
            for n in read:
                heard = graph.observe_prompt(5, prompt, heard, n, slots)
                pieces.append(int(graph.table.step))
            assert_equal_fields(graph.table, want)
            # no later than they are read
            assert pieces[:-1] == [n // 5 for n in read[:-1]]
