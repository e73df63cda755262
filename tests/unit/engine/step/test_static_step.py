"""The step of fixed shapes: the same samples, and nothing in it reads the device."""

from types import SimpleNamespace

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.models import checkpoints
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.runs.tiny_steps import step_with
from helpers.targets import few
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import csd
from csd.engine.step.static_step import Captures
from csd.graph.consensus import ConsensusGraph
from csd.state.context_table import GraphConfig


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama", dtype=torch.float64)


@few(3)
@pytest.mark.parametrize(
    ("lag", "budget"), [(1, 0), (0, 5), (1, 5), (5, 40), (1, "auto"), (5, "auto")]
)
def test_samples_are_those_of_the_eager_step(model, lag, budget):
    options = dict(num_samples=5, max_new_tokens=20, seed=1, temperature=0.8, top_p=0.9)
    runs = []
    for static in (False, True):
        with csd.Engine(model, max_slots=4, static=static, lag=lag if static else 0) as engine:
            runs.append(engine.generate(PROMPTS, budget=budget, **options))
    assert_same_samples(*runs)
    for want, got in zip(*runs, strict=True):
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-12)
        assert (got.stats.nodes_proposed > 0) == (budget != 0)


def test_without_speculation(model):
    with csd.Engine(model, static=True) as engine:
        out = engine.generate(PROMPTS[0], num_samples=3, max_new_tokens=9, seed=2, speculate=False)
    with csd.Engine(model) as engine:
        want = engine.generate(PROMPTS[0], num_samples=3, max_new_tokens=9, seed=2)
    assert out.tokens == want.tokens and out.stats.nodes_proposed == 0


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_plain_runs_insert_nothing_into_the_graph(model, static):
    options = dict(num_samples=2, max_new_tokens=5, seed=2)
    with csd.Engine(model, static=static) as engine:
        engine.generate(PROMPTS, speculate=False, **options)
        assert int(engine.caches.drafter.table.step) == 0
        # and after a run with drafts it still would
        engine.generate(PROMPTS, budget=8, **options)
        inserts = int(engine.caches.drafter.table.step)
        engine.generate(PROMPTS, speculate=False, **options)
        assert int(engine.caches.drafter.table.step) == inserts > 2


def test_calls_without_static_support_run_eagerly(model):
    asked = dict(num_samples=3, max_new_tokens=20, seed=2, temperature=0.5, budget=8)
    with csd.Engine(model, static=True) as engine, csd.Engine(model, static=False) as eager:
        for what in ({"drafter": "prompt-lookup"}, {"verifier": "recursive"}):
            out = engine.generate(PROMPTS, **asked, **what)
            want = eager.generate(PROMPTS, **asked, **what)
            assert [r.tokens for r in out] == [r.tokens for r in want]
            assert [r.stats.accepted for r in out] == [r.stats.accepted for r in want]
            assert sum(r.stats.nodes_proposed for r in out) > 0


def tiny_step(slots=3, device="cpu"):
    """A step with the consensus graph, on whatever mode is current."""

    def graph(ops, device):
        return ConsensusGraph(ops, device, GraphConfig(capacity=256))

    return step_with(graph, slots, device, observes=False)


@pytest.mark.parametrize("nodes", [0, 13])
def test_nothing_reads_the_device(nodes):
    step = tiny_step()
    with NoHostReads():
        pendings = [step.start(16, nodes, [None] * 3, i) for i in range(6)]
    records = [p.read() for p in pendings]
    assert all(count >= 1 for r in records for count in r.count)
    assert any(r.costs for r in records) == bool(nodes)


def test_steps_report_their_time(monkeypatch):
    """On a CPU by the clock around the whole of it."""
    clock = iter((3.0, 3.25, 7.0, 7.5))
    monkeypatch.setattr("csd.engine.step.static_step.time.perf_counter", lambda: next(clock))
    step = tiny_step()
    records = [step.start(16, nodes, [None] * 3, 1).read() for nodes in (13, 0)]
    assert [r.model_seconds for r in records] == [0.25, 0.5]
    assert [r.rows for r in records] == [16, 16]
    assert sum(records[1].nodes) == 3


def test_events_time_a_replay(monkeypatch):
    """Scripted: a device that counts a millisecond for each thing it is told to do."""
    step = tiny_step()
    snapshot, *_ = step.body(16, 13)
    noted, empty_like = [], torch.empty_like

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            noted.append("event")
            self.at = len(noted)

        def synchronize(self):
            noted.append("wait")

        def elapsed_time(self, end):
            assert noted[-1] == "wait"
            return float(end.at - self.at)

    class Pinned:
        """The target of a copy."""

        def __init__(self, x, device, pin_memory):
            assert device == "cpu" and pin_memory

        def copy_(self, x, non_blocking):
            assert non_blocking
            noted.append("copy")
            return empty_like(x).copy_(x)

    def capture(self, run):
        noted.append("capture")
        return SimpleNamespace(replay=lambda: noted.append("replay")), (snapshot, None)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty_like", Pinned)
    monkeypatch.setattr(Captures, "_capture", capture)
    live = SimpleNamespace(
        is_cuda=True,
        clone=lambda: "live",
        zero_=lambda: noted.append("none live"),
        copy_=lambda x: noted.append(x),
    )
    step.slots = SimpleNamespace(live=live)
    pendings = [step.start(16, 13, [None] * 3, i) for i in (1, 2)]
    replayed = ["event", "replay", "copy", "copy", "event"]
    # nothing is waited for before a record is read; a capture, and the replay that loads its graph,
    # are no part of the step
    assert noted == ["none live", "capture", "replay", "live", *replayed, *replayed]
    records = [p.read() for p in pendings]
    assert noted[-2:] == ["wait", "wait"]
    assert [r.model_seconds for r in records] == [0.004, 0.004]
    assert [r.count for r in records] == [snapshot.ints[:3].tolist()] * 2


@pytest.mark.parametrize("what", ["item", "nonzero", "mask", "equal", "unique"])
def test_a_host_read_is_found(what):
    x = torch.arange(3)
    with NoHostReads(), pytest.raises(AssertionError):
        {
            "item": lambda: x.sum().item(),
            "nonzero": x.nonzero,
            "mask": lambda: x[x > 1],
            "equal": lambda: torch.equal(x, x + 0),
            "unique": x.unique,
        }[what]()


def test_shapes_do_not_depend_on_values(monkeypatch):
    """No tensor has values here, so nothing can depend on them."""
    for name in ("cpu", "tolist", "item", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name: pytest.fail(f"{name} called"))
    with FakeTensorMode():
        step = tiny_step()
        for rows in (16, 32):
            _, pool, verdict = step.body(rows, rows)
            assert pool.token.shape == verdict.sample.shape == (rows,)


class OneDevice(TorchDispatchMode):
    """Rejects what makes or reads a tensor elsewhere than on a step's device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, found)):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                raise AssertionError(f"{func} on a tensor of the {x.device.type}")
        return found


@pytest.mark.parametrize("nodes", [0, 16])
def test_a_step_stays_on_its_device(monkeypatch, nodes):
    cpu = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda device: cpu)
    step = tiny_step(device="meta")
    with OneDevice():
        step.top = step.trees = True
        snapshot, *_ = step.body(16, nodes)
        assert snapshot.ints.is_meta and snapshot.floats.is_meta
        with pytest.raises(AssertionError, match="of the cpu"):
            step.slots.group[torch.tensor([1])]
