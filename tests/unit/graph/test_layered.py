"""The source paper's method in tensors: what it drafts, and that a static step can hold it."""

from pathlib import Path

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models import checkpoints
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.runs.tiny_steps import OneDevice, step_with
from helpers.targets import few, slow
from torch._subclasses.fake_tensor import FakeTensorMode

import bench
import csd
from csd.evaluate.replay import replay
from csd.graph.layered import LayeredDag
from csd.kernels.ops import reference, triton
from csd.research.baselines.multi_sample_paper import Paper
from csd.state.texts import DagConfig
from csd.traces.traces import Trace, read_traces

TRACES = Path(bench.__file__).parent / "traces" / "study.jsonl.gz"
OPTIONS = dict(num_samples=5, max_new_tokens=40, seed=3, temperature=0.5)


def drafter(ops=None, **config):
    return lambda engine_ops, device: LayeredDag(ops or engine_ops, device, DagConfig(**config))


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def plain(model):
    with csd.Engine(model) as engine:
        return engine.generate(PROMPTS, speculate=False, **OPTIONS)


@few(2)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("nodes", [4, 16])
def test_replay_commits_like_the_host_drafter(tree, nodes):
    """Recorded samples: the same chain, step by step. As a tree the pool is shared by all."""
    trace = next(t for t in read_traces(TRACES) if str(t.problem).startswith("sums/"))
    short = Trace(
        trace.problem,
        trace.prompt,
        [s[:40] for s in trace.samples[:5]],
        trace.temperature,
        trace.top and [t[:40] for t in trace.top[:5]],
    )
    ours = replay(short, LayeredDag(reference(), "cpu", DagConfig(tree=tree)), 5, nodes)
    theirs = replay(short, Paper(tree=tree), 5, nodes)
    assert ours.tau > 1
    if not tree and nodes == 16:
        # nobody's chain is longer than its share
        assert (ours.steps, ours.sample_steps) == (theirs.steps, theirs.sample_steps)
    else:
        assert ours.tau == pytest.approx(theirs.tau, abs=0.1)


@pytest.mark.parametrize("name", ["paper", "paper-tree"])
def test_samples_that_take_a_slot_later_draft_from_finished_ones(model, plain, name):
    """Two slots, five samples: what finished ones said is still searched, of this group alone."""
    engine = csd.Engine(model, max_slots=2, together=2)
    with engine:
        out = engine.generate(PROMPTS, drafter=name, budget=16, **OPTIONS)
        texts = engine.caches.drafter.texts
        assert texts.rows == 8
        held = {
            (int(texts.group_key[r]), int(texts.sample[r])): texts.token[
                r, engine.caches.drafter.context : texts.length[r]
            ].tolist()
            for r in range(texts.rows)
            if texts.group_key[r] >= 0
        }
    assert_same_samples(out, plain)
    groups = sorted({key for key, _ in held})
    assert len(held) == 8 and len(groups) == 2
    for (key, sample), tokens in held.items():
        assert tokens == out[groups.index(key)].tokens[sample]


@slow
def test_layered_kernels_draft_like_the_references(model):
    """Whole generations with interpreted kernels in the drafter alone."""
    runs = []
    for ops in (reference(), triton()):
        with csd.Engine(model, max_slots=3) as engine:
            short = OPTIONS | {"max_new_tokens": 16}
            make = drafter(ops, tree=True)
            runs.append(engine.generate(PROMPTS[:1], drafter=make, budget=12, **short))
    assert_same_samples(*runs)
    for a, b in zip(*runs, strict=True):
        assert a.stats.nodes_proposed == b.stats.nodes_proposed > 0
        assert a.stats.accepted == b.stats.accepted


@pytest.mark.parametrize("nodes", [0, 13])
def test_nothing_reads_the_device(nodes):
    step = step_with(drafter(tree=True))
    with NoHostReads():
        pendings = [step.start(16, nodes, [None] * 3, i) for i in range(6)]
    records = [p.read() for p in pendings]
    assert all(count >= 1 for r in records for count in r.count)
    assert any(r.costs for r in records) == bool(nodes)


def test_static_steps_draft_like_eager_ones():
    """The same pools from the same texts, whatever the pool's size leaves as padding."""
    pools = []
    for rows in (16, 32):
        step = step_with(drafter(tree=True, k=1, edits=0))
        # of the two likeliest tokens each, so that samples say the same again
        step.slots.top_k.fill_(2)
        for _ in range(16):
            _, pool, _ = step.body(rows, 9)
        pools.append(pool)
    used = int(pools[0].slot_nodes.sum())
    assert used > 3
    for name in ("token", "parent", "slot", "depth", "position", "ancestors", "cost", "context"):
        assert torch.equal(getattr(pools[0], name)[:used], getattr(pools[1], name)[:used])


def test_shapes_do_not_depend_on_values(monkeypatch):
    for name in ("cpu", "tolist", "item", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name: pytest.fail(f"{name} called"))
    with FakeTensorMode():
        step = step_with(drafter(tree=True))
        for rows in (16, 32):
            _, pool, verdict = step.body(rows, rows)
            assert pool.token.shape == verdict.sample.shape == (rows,)


def test_a_step_stays_on_its_device(monkeypatch):
    cpu = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda device: cpu)
    step = step_with(drafter(tree=True), device="meta")
    with OneDevice():
        step.top = step.trees = True
        snapshot, *_ = step.body(16, 16)
        assert snapshot.ints.is_meta and snapshot.floats.is_meta
