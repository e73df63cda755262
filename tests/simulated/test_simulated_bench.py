"""The GPU benchmark's own path for CUDA, on a GPU that is not there and a tiny shape."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from simulated_gpu import Gpu

from bench import attention_rivals, kernels, timing
from bench.aot import Shape
from bench.aot.run import OutOfTime
from bench.attention_job import JobShape
from bench.gpu import compile as compile_ahead
from bench.gpu import drafters, end_to_end, equality, outside, parity, products, workload
from bench.gpu.section import Section
from bench.shapes import SHAPES
from csd.engine import static_step
from csd.graph import consensus
from csd.models import exact
from csd.state.context_table import GraphConfig

TINY = replace(SHAPES["tiny"], context=2048)


def small(trace):
    """Six tokens a sample, out of the tiny vocabulary."""
    def ids(tokens):
        return [t % TINY.vocab for t in tokens]

    samples = [ids(s[:6]) for s in trace.samples]
    return replace(trace, prompt=ids(trace.prompt), samples=samples, top=None, stop_ids=())


@pytest.fixture
def section(monkeypatch, tmp_path):
    """Both large shapes are the tiny one; the graph is small, for the references copy it."""
    monkeypatch.setattr(static_step, "SIZES", (16, 32))
    monkeypatch.setattr(consensus, "GraphConfig", partial(GraphConfig, capacity=1 << 10))
    monkeypatch.setitem(SHAPES, "llama-3.1-8b", TINY)
    monkeypatch.setitem(SHAPES, "qwen2.5-7b", replace(TINY, family="qwen2", qkv_bias=True,
                                                      qk_norm=False))  # fmt: skip
    whole = workload.recorded

    def short(section):
        return [small(t) for t in whole(section)]

    for module in (end_to_end, drafters, equality):
        monkeypatch.setattr(module, "recorded", short)
    with Gpu() as gpu:
        made = Section("name", tmp_path, torch.device("cuda"), False, 1000.0)
        made.gpu = gpu
        yield made


def test_end_to_end(section, monkeypatch):
    def profiled(run):
        # everything has been timed before
        assert len(section.rows) == 2
        before = section.gpu.replays
        run()
        # a second a step, and as much as three for the prompt
        return {"attention": section.gpu.replays - before + 3.0, "other": 3.0}

    monkeypatch.setattr(end_to_end, "SAMPLES", (4, 1))
    monkeypatch.setattr(end_to_end, "PAIRS", 2)
    monkeypatch.setattr(end_to_end, "shapes", lambda section: {"tiny": TINY})
    monkeypatch.setattr(end_to_end, "measure", lambda d: dict(bandwidth=1e9, flops=1e9))
    monkeypatch.setattr(end_to_end, "device_seconds", profiled)
    end_to_end.run(section)
    assert [(row["shape"], row["N"]) for row in section.rows] == [("tiny", 4), ("tiny", 1)]
    for row in section.rows:
        assert row["pairs"] == 2 and row["plain steps"] == 6 and row["tau"] >= 1
        assert row["peak memory GB"] > 0 and math.isfinite(row["step ms"])
        assert row["synchronisations"] == 0
        # what a step takes, without the prompt
        assert row["phases ms"] == pytest.approx({"attention": 1e3, "other": 0})


def test_drafters(section, monkeypatch):
    monkeypatch.setattr(drafters, "SAMPLES", 4)
    monkeypatch.setattr(drafters, "BUDGET", 16)
    drafters.run(section)
    found = {row["drafter"]: row for row in section.rows}
    assert {"consensus", "prompt-lookup", "paper", "rest"} <= set(found)
    assert found["one EAGLE layer, latency only"]["us_a_level"] > 0
    assert all(row["drafting_us_a_step"] > 0 for row in section.rows if "steps" in row)


def called(call):
    call()
    return 1.0


def test_equality(section, monkeypatch, ordered_products):
    monkeypatch.setattr(exact, "GPU_SIZES", (1, 16, 17, 33))
    monkeypatch.setattr(products, "SIZES", (16,))
    monkeypatch.setattr(products, "copies_for", lambda size: 1)
    monkeypatch.setattr(products, "replayed", lambda calls, count: [sum(map(called, calls))])
    monkeypatch.setattr(products, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(products, "shapes", lambda section: {"tiny": TINY})
    monkeypatch.setattr(equality, "SAMPLES", 2)
    monkeypatch.setattr(equality, "NEW", 3)
    # "auto" times steps of every size, interpreted
    assert set(equality.BUDGETS) == {0, 16, 32, "auto"}
    monkeypatch.setattr(equality, "BUDGETS", (0, 32))
    traces = [replace(t, prompt=t.prompt[:12]) for t in equality.recorded(section)]
    monkeypatch.setattr(equality, "recorded", lambda section: traces)
    monkeypatch.setattr(equality, "shapes", lambda section: {"tiny": TINY})
    equality.run(section)
    drawn = [row for row in section.rows if "product" not in row]
    assert all(row["same_again"] for row in drawn)
    assert [row["budget"] for row in drawn if row["exact"]] == [0, 32]
    assert sum(not row["exact"] for row in drawn) == 3
    assert all(row["equal_samples"] == 1 for row in drawn if row["exact"])
    prices = [row for row in section.rows if "product" in row]
    gated = ["gate_up", "gate_up, SwiGLU"]
    assert [row["product"] for row in prices] == ["qkv", "out", *gated, "down"]
    assert all(row["triton us"] > 0 and row["cublas 64 us"] > 0 for row in prices)


def test_compile(section, monkeypatch):
    tasks, late = [], False

    def compiled(found, processes, cache, timeout):
        tasks[:] = found
        rows = [dict(kernel=f"verify {dtype}", target="sm_90", dtype=dtype, shared=1, limit=2,
                     spills=spills, stack=0) for _, dtype, _ in found]  # fmt: skip
        if late:
            raise OutOfTime(rows[:1])
        return rows

    monkeypatch.setattr(compile_ahead, "compile_all", compiled)
    spills = 0
    compile_ahead.run(section)
    # in one call, what parity needs first
    assert [(target, dtype, shape.name) for target, dtype, shape in tasks] == [
        ("sm_90", "fp32", "tiny"), ("sm_90", "bf16", "llama-3.1-8b"),
        ("sm_90", "bf16", "qwen2.5-7b"),
    ]  # fmt: skip
    assert len(section.rows) == 3 and "left out" not in section.facts
    late = True
    compile_ahead.run(section)
    assert len(section.rows) == 4
    assert "1 kernels were compiled in time" in section.facts["left out"][0]
    late, spills = False, 8
    with pytest.raises(RuntimeError, match="verify bf16: 8 spills"):
        compile_ahead.run(section)


def test_outside(section, monkeypatch):
    calls = []

    class Model:
        def generate(self, ids, *, max_new_tokens, disable_compile, **options):
            assert ids.shape == (16, 1024) and options["attention_mask"].shape == ids.shape
            calls.append((max_new_tokens, not disable_compile))

    monkeypatch.setattr(outside, "build", lambda section: Model())
    outside.run(section)
    assert [row["compiled"] for row in section.rows] == [False, True, True, True]
    # compiled before it is timed, and without it before that
    assert calls[:5] == [(2, False), (32, False), (1, False), (128, True), (128, True)]


def test_parity(section, monkeypatch):
    monkeypatch.setattr(parity, "SAMPLES", 2)
    monkeypatch.setattr(parity, "NEW", 3)
    parity.engines(section)
    parity.logits(section)
    assert len(section.rows) == 9 + 2
    assert all(row["same"] for row in section.rows), section.rows


def test_replays_are_queued_before_any_is_waited_for():
    with Gpu() as gpu:
        x = torch.zeros(4, device="cuda")
        us, low, high = timing.replayed([lambda: x.add_(1)] * 3, replays=5)
        assert gpu.replays == 5 + 3 and gpu.events == 0
        assert us == low == high > 0


def test_kernels(section, monkeypatch, tmp_path):
    small = Shape.of("tiny", TINY)
    job = JobShape("tiny", 4, 2, 16, samples=2, nodes=3, prompt=70, committed=10)
    monkeypatch.setattr(timing, "DISTINCT", 20_000)
    monkeypatch.setattr(attention_rivals, "compiled", lambda function: function)
    sizes = partial(kernels.Sizes, slots=4, groups=2, rows=16, text=32)
    for name, value in dict(
        SHAPES=[small], Sizes=sizes, shapes=lambda full: [job],
        RIVALS={"sdpa": attention_rivals.sdpa}, copy_bandwidth=lambda device: 1e12,
        make=partial(kernels.make, dtype=torch.float32),
    ).items():  # fmt: skip
        monkeypatch.setattr(kernels, name, value)
    path = tmp_path / "kernels.json"
    _, rows = kernels.on_gpu(SimpleNamespace(only=None, full=False, replays=3, json=path))
    # whoever ends the run has what was done
    written = json.loads(path.read_text())
    assert written.pop("machine")
    assert written == {"bench": "kernels", "complete": False, "rows": rows}
    kept = []
    monkeypatch.setattr(kernels, "_keep", lambda _, rows: kept.append(len(rows)))
    kernels.on_gpu(SimpleNamespace(only="step", full=False, replays=3, json=path))
    assert kept == [*range(1, len(rows) - 1)]
    assert {row["provider"] for row in rows} == {"csd", "sdpa"}
    assert {row["kernel"] for row in rows} >= {"draft_tree", "graph_insert", "verify", "commit"}
    assert not [row["note"] for row in rows if row["note"]]
    assert all(row["us"] > 0 for row in rows)
