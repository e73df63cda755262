"""Updates of steps without drafts that wait, as rows and in a graph that is read again."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.kernels.draft_cases import random_slots
from helpers.models.scripted import PrefixSum, engine

import csd
from bench.lib.shapes import random_model
from csd.engine.step.budget import Budget
from csd.engine.step.step import Step
from csd.graph import consensus as module
from csd.graph.consensus import ConsensusGraph, DeferredInserts
from csd.kernels.ops import reference
from csd.kernels.table.observe import observe, observe_ref, observe_triton
from csd.kernels.verify import verify_ref
from csd.state.context_table import GraphConfig
from csd.state.pool_builder import roots

CONFIG = GraphConfig(orders=(1, 2, 3), capacity=1 << 10)


def steps(seed, count):
    """Slots, and the pools and verdicts of `count` steps without drafts.

    Of 8 tokens: a context keeps as many, so it does not matter when which of them came.
    """
    slots = random_slots(random.Random(seed), 6, live=True)
    slots.max_new[:] = 1 << 20
    slots.stop_ids.fill_(-1)
    slots.seen = torch.zeros(6, 4, dtype=torch.int32)
    made = []
    for step in range(count):
        pool = roots(slots, slots.count)
        g = torch.Generator().manual_seed(seed * 100 + step)
        verdict = verify_ref(torch.randn(slots.count, 8, generator=g) * 3, pool, slots)
        made.append((pool, verdict))
    return slots, made


def advance(slots, verdict):
    """Change what later steps change and `observe` reads."""
    slots.step += 1
    slots.sample += 3


def lines(seen):
    """Rows with a key, in an order of their own."""
    token = torch.where(seen.succ_weight > 0, seen.succ_token, -1)
    rows = torch.cat(
        [
            seen.group_key[:, None],
            seen.context,
            token,
            seen.succ_weight,
            seen.row_total[:, None],
            seen.source_bit[:, None],
        ],
        1,
    )
    return sorted(rows[seen.group_key >= 0].tolist())


@pytest.mark.parametrize("observation", [observe_ref, observe_triton, observe])
def test_deferred_inserts_equal_single_ones(observation):
    slots, made = steps(1, 5)
    later, alone = DeferredInserts(), []
    for pool, verdict in made:
        alone += lines(observe_ref(pool, slots, verdict, CONFIG))
        later.add(pool, slots, verdict)
        advance(slots, verdict)
    assert alone
    ops = replace(reference(), observe=observation)
    assert lines(later.observe(slots, CONFIG, ops)) == sorted(alone)
    assert later.rows == 0


def test_groups_that_have_gone_are_left_out():
    slots, made = steps(2, 3)
    later = DeferredInserts()
    for pool, verdict in made:
        later.add(pool, slots, verdict)
    gone = int(slots.group_key[slots.group[0]])
    slots.group_key[slots.group[0]] = -1
    seen = later.observe(slots, CONFIG, reference())
    assert gone not in seen.group_key.tolist()


def test_a_graph_takes_them_in_when_it_catches_up_and_when_many_wait(monkeypatch):
    slots, made = steps(3, 4)
    at_once, waits = (ConsensusGraph(reference(), "cpu", CONFIG) for _ in range(2))
    for pool, verdict in made:
        at_once.insert(pool, slots, verdict)
        waits.insert(pool, slots, verdict, defer=True)
    empty = waits.table.entry_group < 0
    assert empty.all()
    waits.flush(slots)
    rows = slots.count + 20
    wanted, got = (graph.propose(slots, rows) for graph in (at_once, waits))
    assert (wanted.depth > 0).any()
    for name in ("token", "parent", "slot", "cost", "source"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name

    monkeypatch.setattr(module, "MAX_ROWS", 2 * slots.count)
    full = ConsensusGraph(reference(), "cpu", CONFIG)
    for i, (pool, verdict) in enumerate(made[:2]):
        assert (full.table.entry_group < 0).all(), i
        full.insert(pool, slots, verdict, defer=True)
    assert not (full.table.entry_group < 0).all()


def test_new_calls_drop_deferred_inserts():
    slots, made = steps(4, 1)
    graph = ConsensusGraph(reference(), "cpu", CONFIG)
    graph.insert(made[0][0], slots, made[0][1], defer=True)
    graph.start_call()
    graph.flush(slots)
    assert (graph.table.entry_group < 0).all()


@pytest.mark.parametrize("verifier", ["match", "canonical", "single"])
def test_drafts_equal_those_without_deferral(verifier, monkeypatch):
    """Every third step drafts. Of 8 tokens, as above."""
    asked = []

    def ask(budget, live):
        asked.append(12 if len(asked) % 3 == 2 else 0)
        return asked[-1]

    monkeypatch.setattr(Budget, "num_draft_tokens", ask)
    insert, runs = ConsensusGraph.insert, []

    def at_once(graph, pool, slots, verdict, defer=False):
        insert(graph, pool, slots, verdict)

    for _ in range(2):
        asked.clear()
        out = engine(PrefixSum(vocab=8)).generate(
            [1, 2, 3],
            num_samples=4,
            max_new_tokens=24,
            seed=1,
            budget=12,
            verifier=verifier,
            drafts=True,
        )
        runs.append(([s.tokens for s in out.samples], [s.drafts for s in out.samples]))
        assert out.stats.nodes_proposed
        monkeypatch.setattr(ConsensusGraph, "insert", at_once)
    assert runs[0] == runs[1]


def test_taking_them_in_is_not_counted_as_time_that_drafts_take(monkeypatch):
    now, left, launched = [0.0], [0], []
    monkeypatch.setattr("csd.engine.step.step.time.perf_counter", lambda: now[0])

    def flush(graph, slots):
        now[0] += left.pop() if left else 0

    def launch(step, *args):
        left[:] = [100]
        launched.append((step, own(step, *args)))
        return launched[-1][1]

    own = Step.launch
    monkeypatch.setattr(ConsensusGraph, "flush", flush)
    monkeypatch.setattr(Step, "launch", launch)
    drawing = dict(num_samples=2, max_new_tokens=8, seed=0, budget=4)
    out = csd.generate(random_model("tiny"), [1, 2, 3], **drawing)
    assert len(launched) == out.stats.steps
    assert {pending.draft_seconds for _, pending in launched} == {0}
    assert launched[-1][0].seconds["propose"] >= 100
