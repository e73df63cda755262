"""The GPU benchmark's own path for CUDA, on a GPU that is not there and a tiny shape."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.targets import slow
from simulated_bench import AT_ONCE, TINY, Run, tiny_shapes
from simulated_gpu import Gpu
from simulated_gpu.clock import Clock

from bench.gpu.aot import Shape
from bench.gpu.aot.run import OutOfTime
from bench.gpu.calls import CALLS, SECONDS
from bench.gpu.lib import workload
from bench.gpu.lib.section import Section
from bench.gpu.plan import box
from bench.gpu.sections import compile as compile_ahead
from bench.gpu.sections import drafters, equality, outside, parity
from bench.micro import kernels, timing
from bench.micro.jobs import attention_rivals
from bench.micro.jobs.attention_job import JobShape
from csd.kernels.common.compile_jobs import named

SECTIONS = ("doctor", "compile", "products", "parity", "end_to_end", "prefill", "first_call")

pytestmark = [slow, pytest.mark.stand_in]


@pytest.fixture
def section(tmp_path):
    with tiny_shapes(), Gpu() as gpu:
        made = Section("name", tmp_path, torch.device("cuda"), 1000.0)
        made.gpu = gpu
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Sections of a ten minutes' run, where nothing takes longer than is thought."""
    return Run(tmp_path_factory.mktemp("whole"), Clock(), "--only", *SECTIONS)


def test_sections_end_within_their_boxes(whole):
    assert whole.code == 0
    assert set(whole.status.values()) == {"done"}
    assert set(whole.charged) == set(SECTIONS)
    for name, charged in whole.charged.items():
        assert sum(charged.values()) < box(name, 10), name
    # they run side by side
    assert whole.seconds < sum(sum(c.values()) for c in whole.charged.values())


def test_kernels_are_checked_in_their_own_section_alone(whole):
    checked = [name for name, charged in whole.charged.items() if "checks" in charged]
    assert checked == ["doctor"]
    assert whole.charged["doctor"]["checks"] == 5 * whole.clock.check / AT_ONCE
    assert len(whole.found["doctor"]["rows"]) == 5


@pytest.mark.parametrize(
    ("slow", "cut", "code"),
    [
        (dict(check=60), ["doctor"], 0),
        (dict(compilation=30), ["parity"], 1),
    ],
    ids=["checks", "compilation"],
)
def test_what_takes_too_long_is_cut(tmp_path, monkeypatch, slow, cut, code):
    """A section that its box cuts takes no time of others; without parity the exit code is 1."""
    names = ["doctor", "compile", "parity"] if code else ["doctor", "compile", "products"]
    monkeypatch.setattr(parity, "CASES", {"0.7": parity.CASES["0.7"]})
    monkeypatch.setattr(parity, "LONG", {})
    run = Run(tmp_path, Clock(**slow), "--only", *names)
    assert [name for name, status in run.status.items() if status == "cut"] == cut
    assert run.code == code
    assert run.seconds <= sum(box(name, 10) for name in names if name != "compile")


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """Both calls of a lent GPU, whose checks take longer than they should."""
    out = tmp_path_factory.mktemp("calls")

    # a first launch compiles nothing but its launcher: binaries are made ahead, or carried along
    def call(number, *options):
        into = out / f"{number}.json"
        options = ["--call", str(number), "--into", str(into), *options]
        run = Run(out / f"out{number}", Clock(check=40.0, compilation=0.4), *options)
        run.into = json.loads(into.read_text())
        return run

    first = call(1)
    return first, call(2, "--kept", str(out / "1.json"))


def test_both_calls_are_complete(called):
    """Every section of a call is reached, on CUDA's own path, and nothing of it is left out."""
    for number, run in enumerate(called, 1):
        assert run.code == 0
        names = [f"{number}/{name}" for together, _ in CALLS[number] for name in together]
        assert list(run.status) == names and set(run.status.values()) == {"done"}
        assert run.seconds < SECONDS[number]
        assert all(run.into[name] == run.found[name] for name in names)
    first, second = called
    assert set(second.into) == {*first.into, *second.found}


def test_calls_check_what_their_sections_use(called):
    checks = [
        {(row["shape"], row["dtype"], row["exact"]) for row in run.found[f"{i}/doctor"]["rows"]}
        for i, run in enumerate(called, 1)
    ]
    llama, qwen = ((name, "bfloat16") for name in ("llama-3.1-8b", "qwen2.5-7b"))
    assert checks == [
        {("tiny", "float32", False), (*llama, False)},
        {(*llama, True), (*qwen, False)},
    ]
    tasks = [[(dtype, shape.name) for _, dtype, shape in run.tasks] for run in called]
    assert tasks == [
        [("fp32", "tiny"), ("bf16", llama[0])],
        [("bf16", llama[0]), ("bf16", qwen[0])],
    ]


def test_calls_are_short(called):
    first, second = called
    (attention,) = first.commands
    assert "--quick" in attention
    assert any("single kernels" in why for why in first.found["1/parity"]["left out"])
    drawn = [r for r in second.found["2/equality"]["rows"] if "product" not in r]
    assert [(r["exact"], r["budget"]) for r in drawn] == [(True, 32), (False, 32)]
    assert drawn[0]["equal_samples"] == 1


def test_shapes_of_calls(tmp_path, monkeypatch):
    def of(call, name, gib=80):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gib << 30))
        section = Section(name, tmp_path, torch.device("cuda"), 1.0, call=call)
        return [*workload.shapes(section)]

    llama, qwen = "llama-3.1-8b", "qwen2.5-7b"
    assert of(0, "end_to_end") == of(2, "doctor") == of(2, "compile") == [llama, qwen]
    assert of(1, "end_to_end") == of(1, "doctor") == of(2, "equality") == [llama]
    assert of(2, "end_to_end") == [qwen]
    assert of(0, "end_to_end", 15) == of(2, "doctor", 15) == ["qwen2.5-0.5b"]


def test_products_by_rows(whole):
    rows = whole.found["products"]["rows"]
    assert [r["product"] for r in rows[::3]] == ["qkv", "out", "gate_up", "down"]
    # a device whose products depend on their rows is found out
    assert {r["rows"] for r in rows if not r["same_bits"]} == {32}


def test_parity(whole):
    rows = whole.found["parity"]["rows"]
    assert all(row["same"] for row in rows), rows
    sides = ("plain", "static", "triton")
    assert len(rows) == len(sides) * (8 + 3) + 2 + 2 + 1
    assert any("closed midway" in row["what"] for row in rows)


def test_end_to_end(whole):
    rows = whole.found["end_to_end"]["rows"]
    assert [(row["shape"], row["N"]) for row in rows] == [("tiny", 4), ("tiny", 1)]
    for row in rows:
        assert row["pairs"] == 2 and row["plain steps"] == 6 and row["tau"] >= 1
        assert row["peak memory GB"] > 0 and math.isfinite(row["step ms"])
        assert row["synchronisations"] == 0
        # what a step takes, without the prompt
        assert row["phases ms"] == pytest.approx({"attention": 1e3, "other": 0})


def test_first_calls_and_prompts(whole):
    made, row = whole.found["first_call"]["rows"]
    assert made["what"] == "model and engine"
    assert row["cold_seconds"] > 10 * row["warm_seconds"]
    assert row["graphs"][-1] == row["graphs"][-2] >= row["graphs"][0] > 0
    assert row["device_ms_a_step"] > 0 and row["peak_bytes_beyond"] > 0
    assert row["predicted_bytes"]["total"] > 0
    (read,) = whole.found["prefill"]["rows"]
    assert read["prompts"] == 3 and read["tokens_per_second"] > 0


def test_drafters(section, monkeypatch):
    monkeypatch.setattr(drafters, "SAMPLES", 4)
    monkeypatch.setattr(drafters, "BUDGET", 16)
    drafters.run(section)
    found = {row["drafter"]: row for row in section.rows}
    assert {"consensus", "prompt-lookup", "paper", "rest"} <= set(found)
    assert found["one EAGLE layer, latency only"]["us_a_level"] > 0
    assert all(row["drafting_us_a_step"] > 0 for row in section.rows if "steps" in row)


def test_equality(section, monkeypatch):
    # "auto" times steps of every size, interpreted
    assert set(equality.BUDGETS) == {0, 16, 32, "auto"}
    monkeypatch.setattr(equality, "BUDGETS", (0, 32))
    traces = [replace(t, prompt=t.prompt[:12]) for t in equality.recorded(section)]
    monkeypatch.setattr(equality, "recorded", lambda section: traces)
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
        rows = [
            dict(
                kernel=f"verify {dtype}",
                target="sm_90",
                dtype=dtype,
                shared=1,
                limit=2,
                spills=spills,
                stack=0,
            )
            for _, dtype, _ in found
        ]
        if late:
            raise OutOfTime(rows[:1])
        return rows

    monkeypatch.setattr(compile_ahead, "compile_all", compiled)
    spills = 0
    compile_ahead.run(section)
    # in one call, what parity needs first
    assert [(target, dtype, shape.name) for target, dtype, shape in tasks] == [
        ("sm_90", "fp32", "tiny"),
        ("sm_90", "bf16", "llama-3.1-8b"),
        ("sm_90", "bf16", "qwen2.5-7b"),
    ]
    assert len(section.rows) == 3 and "left out" not in section.facts
    late = True
    compile_ahead.run(section)
    assert len(section.rows) == 4
    assert "1 kernels were compiled in time" in section.facts["left out"][0]
    late, spills = False, 8
    with pytest.raises(RuntimeError, match="verify bf16: 8 spills"):
        compile_ahead.run(section)


@pytest.mark.parametrize(("capability", "target"), [((12, 0), "sm_120"), ((8, 9), "sm_89")])
def test_kernels_are_compiled_for_the_chip_at_hand(section, monkeypatch, capability, target):
    asked = []

    def compiled(tasks, *args, **options):
        asked.extend(tasks)
        return []

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(compile_ahead, "compile_all", compiled)
    compile_ahead.run(section)
    assert {task[0] for task in asked} == {section.facts["target"]} == {target}
    chip = named(target)
    assert (chip.arch, chip.shared) == (10 * capability[0] + capability[1], 99 * 1024)


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
        SHAPES=[small],
        Sizes=sizes,
        shapes=lambda full: [job],
        RIVALS={"sdpa": attention_rivals.sdpa},
        copy_bandwidth=lambda device: 1e12,
        make=partial(kernels.make, dtype=torch.float32),
    ).items():
        monkeypatch.setattr(kernels, name, value)
    path = tmp_path / "kernels.json"
    asked = partial(SimpleNamespace, full=False, quick=False, beside=[], replays=3, json=path)
    _, rows = kernels.on_gpu(asked(only=None))
    # whoever ends the run has what was done
    written = json.loads(path.read_text())
    assert written.pop("machine")
    assert written == {"bench": "kernels", "complete": False, "rows": rows}
    kept = []
    monkeypatch.setattr(kernels, "_keep", lambda _, rows: kept.append(len(rows)))
    kernels.on_gpu(asked(only="step"))
    # in little time one model beside what needs no compilation
    monkeypatch.setattr(attention_rivals, "compiled", lambda function: pytest.fail("compiles"))
    other = replace(job, model="other")
    monkeypatch.setattr(kernels, "shapes", lambda full: [job, other])
    _, quick = kernels.on_gpu(asked(only="attention", quick=True))
    timed = [(row["provider"], row["shape"], row["note"]) for row in quick]
    assert timed == [("csd", str(job), ""), ("sdpa, eager merge", str(job), "")]
    assert kept == [*range(1, len(rows) - 1), 2]
    assert {row["provider"] for row in rows} == {"csd", "sdpa"}
    assert {row["kernel"] for row in rows} >= {"draft_tree", "graph_insert", "verify", "commit"}
    assert not [row["note"] for row in rows if row["note"]]
    assert all(row["us"] > 0 for row in rows)
