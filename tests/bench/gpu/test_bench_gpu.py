"""The GPU benchmark on a CPU: every section runs, on a tiny shape."""

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from helpers.kernels.step_kernels import STEP
from helpers.targets import slow
from huggingface_hub import scan_cache_dir
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from bench.gpu import __main__ as gpu
from bench.gpu.lib import parity_logits, phases
from bench.gpu.lib.phases import by_phase, phase_of
from bench.gpu.lib.roofline import parameters, step_seconds
from bench.gpu.lib.section import Section
from bench.gpu.lib.timed import timed
from bench.gpu.lib.workload import groups
from bench.gpu.plan import BOXES
from bench.gpu.sections import checkpoint, doctor, parity
from bench.lib import common
from bench.lib.shapes import SHAPES
from csd.doctor import Check
from csd.traces.traces import Trace

pytestmark = pytest.mark.bench


@slow
def test_every_section_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parity, "NEW", 6)
    monkeypatch.setattr(parity, "LONG_NEW", 6)
    monkeypatch.setattr(parity, "WIDE", 2000)
    assert gpu.main(["--out", str(tmp_path), "--minutes", "30", "--device", "cpu"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(summary["sections"]) == list(BOXES)
    assert set(summary["sections"].values()) == {"done"}
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in BOXES}

    (checked,) = found["doctor"]["rows"]
    assert checked["passed"] and checked["shape"] == "tiny" and len(checked["checks"]) > 10
    assert all(row["same"] for row in found["parity"]["rows"])
    assert len(found["parity"]["rows"]) == 2 * (8 + 3) + 2
    ends = found["end_to_end"]["rows"]
    assert {row["N"] for row in ends} == {1, 4}
    for row in ends:
        # the tokens are the trace's, whatever the model, so they are the same on both sides
        assert row["tau"] * row["live"] * row["steps"] == pytest.approx(row["tokens"])
        assert row["rows"] >= row["live"]
        assert row["plain steps"] == 10
        assert row["steps"] <= 10
    drafted = {row["drafter"]: row for row in found["drafters"]["rows"]}
    assert {"consensus", "prompt-lookup", "paper", "rest"} <= set(drafted)
    assert drafted["consensus"]["tau"] >= 1
    assert all(row["equal_tokens"] == 1 for row in found["equality"]["rows"])
    assert found["outside"]["rows"][0]["tokens_per_second"] > 0
    (together,) = found["continuous"]["rows"]
    assert together.get("tokens_per_second", 0) > 0 or "note" in together
    assert found["first_call"]["rows"][1]["predicted_bytes"]["total"] > 0
    assert found["prefill"]["rows"][0]["tokens_per_second"] > 0
    # what needs a GPU, or is not installed, is named
    assert any("attention" in why for why in summary["left out"])
    assert any("--vllm PYTHON" in why for why in summary["left out"])
    if find_spec("flashinfer") is None:
        assert found["attention"]["rows"][0]["note"] == "not installed"


def test_another_thread_draws_from_a_generator_of_its_own():
    """A capture claims the default one, and fails the draws of other threads."""
    before = torch.get_rng_state()
    with parity.other_thread(torch.device("cpu")):
        time.sleep(0.1)
    assert torch.equal(torch.get_rng_state(), before)


def raising():
    raise ZeroDivisionError("in a kernel")


def test_failures_have_tracebacks(tmp_path, monkeypatch):
    """From them alone the next run is prepared."""
    section = Section("parity", tmp_path, torch.device("cpu"), 60.0)
    parity.compare(section, "a case", [], raising)
    (row,) = section.rows
    assert row["error"] == "ZeroDivisionError: in a kernel"
    assert "in raising" in row["traceback"]
    # a check that fails, and one whose process dies
    ends = [
        subprocess.CompletedProcess([], 0, json.dumps(dict(checks=[failed])), LOG)
        for failed in (
            dict(name="verify", calls=1, error="ValueError"),
            dict(name="verify", calls=1, error=None),
        )
    ]
    ends.append(subprocess.CompletedProcess([], -11, "", LOG))
    stand_in = SimpleNamespace(run=lambda *a, **k: ends.pop(0), TimeoutExpired=TimeoutError)
    monkeypatch.setattr(doctor, "subprocess", stand_in)
    section = Section("doctor", tmp_path, torch.device("cpu"), 60.0)
    for _ in range(3):
        job = dict(shape="tiny", dtype="float32", exact=False)
        doctor.add(section, job, doctor.examined(section, job))
    assert [row["passed"] for row in section.rows] == [False, True, False]
    assert [row.get("log") for row in section.rows] == [LOG, None, LOG]
    assert section.rows[2]["error"] == "the process ended with code -11: Segmentation fault"


LOG = "Traceback\n  in a kernel\nSegmentation fault"


def test_a_check_that_fails_logs_its_traceback(caplog):
    try:
        raising()
    except ZeroDivisionError as error:
        with caplog.at_level("INFO", "csd"):
            Check("verify").fail(error)
    assert "verify failed" in caplog.text and "in raising" in caplog.text


def test_vllm_is_asked_in_its_own_environment(tmp_path):
    """A stand-in for the package: what the script asks of it, and what comes back."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    options = ["--out", str(out), "--device", "cpu", "--only", "vllm", "--vllm", str(python)]
    assert gpu.main(options) == 0
    rows = json.loads((out / "vllm.json").read_text())["rows"]
    assert [(r["N"], r["drafts"]) for r in rows if "N" in r] == [
        (16, None),
        (64, None),
        (16, "ngram"),
    ]
    assert all(r["tokens_per_second"] > 0 and r["vllm"] == "0.0" for r in rows if "N" in r)
    # what it fails at is a row, and what it said is kept
    assert rows[-1]["note"] == "code 1, see vllm.log"
    assert "out of memory" in (out / "vllm.log").read_text()
    config = json.loads((out / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 64


STAND_IN = """
import json
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.0"


def SamplingParams(**options):
    assert options["ignore_eos"] and not options["detokenize"]
    return SimpleNamespace(**options)


class LLM:
    def __init__(self, model, load_format, speculative_config, **options):
        assert load_format == "dummy" and json.loads(Path(model, "config.json").read_text())
        self.drafts = speculative_config

    def generate(self, prompts, params, use_tqdm):
        assert len(prompts[0]["prompt_token_ids"]) == 32
        if self.drafts and params.n > 16:
            raise RuntimeError("out of memory")
        print("vLLM prints, too")
        outs = [SimpleNamespace(token_ids=[1] * params.max_tokens) for _ in range(params.n)]
        return [SimpleNamespace(outputs=outs)]
"""


def test_vllm_needs_a_run_that_has_it(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "--device", "cpu", "--vllm", "python"])
    assert "--vllm needs --minutes 30" in capsys.readouterr().err


def test_a_checkpoint_in_the_cache_is_measured(tmp_path, toy_folder, monkeypatch):
    """The largest that is whole, of those whose family csd runs."""
    for name, drop in (("whole", None), ("half", "model.safetensors"), ("bare", "tokenizer.json")):
        repository = tmp_path / "cache" / f"models--org--{name}"
        shutil.copytree(toy_folder, repository / "snapshots" / "0")
        if drop:
            (repository / "snapshots" / "0" / drop).unlink()
            (repository / "snapshots" / "0" / "larger").write_bytes(bytes(10_000_000))
    monkeypatch.setattr(checkpoint, "scan_cache_dir", lambda: scan_cache_dir(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "SAMPLES", (2,))
    monkeypatch.setattr(checkpoint, "COUNT", 2)
    options = ["--out", str(tmp_path), "--device", "cpu", "--only", "checkpoint"]
    assert gpu.main(options) == 0
    (row,) = json.loads((tmp_path / "checkpoint.json").read_text())["rows"]
    assert (row["checkpoint"], row["N"], row["prompts"]) == ("org/whole", 2, 2)
    assert row["tau"] >= 1 and row["equal_samples"] == 1


def test_capturing_runs_are_not_timed():
    engine = SimpleNamespace(captured={})
    section = SimpleNamespace(clock=lambda call: call() or len(done))
    done = []

    def run(new):
        done.append(new)
        if new and len(done) == 1:
            # as many as before, and others
            engine.captured = {**engine.captured, 1: None} if new == "more" else {2: None}
        return [f"run {len(done)}"]

    assert timed(section, engine, lambda: run(False)) == (1, ["run 1"])
    done.clear()
    assert timed(section, engine, lambda: run("more")) == (2, ["run 2"])
    done.clear()
    assert timed(section, engine, lambda: run("other")) == (2, ["run 2"])
    assert len(engine.captured) == 1


def test_the_roofline_of_known_shapes():
    llama, qwen = SHAPES["llama-3.1-8b"], SHAPES["qwen2.5-7b"]
    # weights read a step, in GB of bfloat16
    assert 2 * parameters(llama) / 1e9 == pytest.approx(15.01, abs=0.01)
    assert 2 * parameters(qwen) / 1e9 == pytest.approx(14.14, abs=0.01)
    device = dict(bandwidth=4.3e12, flops=790e12)
    # 16 samples of 1,024 + 1,024 tokens: 3.49 ms of weights, 0.53 of keys and values
    step = step_seconds(llama, rows=16, live=16, prompts=[1024], context=1024, **device)
    assert step * 1e3 == pytest.approx(4.02, abs=0.01)
    # beyond 184 rows a row costs its FLOPs: 19 us
    more = [
        step_seconds(llama, rows=m, live=1, prompts=[1], context=1, **device) for m in (400, 500)
    ]
    assert (more[1] - more[0]) / 100 * 1e6 == pytest.approx(19.0, abs=0.1)


def test_groups_take_one_prompt_with_enough_samples():
    traces = [
        Trace(name, [1], [[i] for i in range(size)], 0.7, None, 1, list(range(size)))
        for name, size in (("big", 6), ("a", 3), ("b", 3))
    ]
    assert [(t.problem, len(t.samples)) for t in groups(traces, 2)] == [("a", 2)]
    assert [t.problem for t in groups(traces, 2, turn=1)] == ["b"]
    assert [(t.problem, len(t.samples)) for t in groups(traces, 5, turn=1)] == [("big", 5)]
    assert [(t.problem, len(t.samples)) for t in groups(traces, 8)] == [("big", 6), ("a", 2)]


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        *[
            (f"{name}_kernel", phase)
            for phase, names in STEP.items()
            if phase != "forward"
            for name in names
        ],
        ("plan_attention_kernel", "attention"),
        ("tree_attention_kernel", "attention"),
        ("merge_partials_kernel", "attention"),
        ("rms_norm_kernel", "elementwise"),
        ("rotary_kernel", "elementwise"),
        ("swiglu_kernel", "elementwise"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matrix products"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
        ("void at::native::(anonymous namespace)::masked_fill_kernel(at)", "other"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
    ],
)
def test_kernels_belong_to_phases(kernel, phase):
    assert phase_of(kernel) == phase


def test_seconds_of_a_profile_are_the_kernels():
    def event(name, device, start, end):
        found = FunctionEvent(1, name, 0, start, end, device_type=device, use_device="cuda")
        # the profiler gives a launch the time of what it launched
        if device == DeviceType.CPU:
            found.append_kernel(name, 0, end - start)
        return found

    events = [
        event("rotary_kernel", DeviceType.CUDA, 0, 3),
        event("cudaGraphLaunch", DeviceType.CPU, 0, 100),
        event("swiglu_kernel", DeviceType.CUDA, 3, 5),
        event("nvjet_tst_64x8", DeviceType.CUDA, 5, 9),
    ]
    assert by_phase(events) == pytest.approx({"elementwise": 5e-6, "matrix products": 4e-6})


def test_a_profile_without_a_gpu_holds_no_kernel(monkeypatch):
    monkeypatch.setattr(phases, "ACTIVITIES", [ProfilerActivity.CPU])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran = []
    assert phases.device_seconds(lambda: ran.append(torch.ones(3) + 1)) == {} and len(ran) == 1


def test_a_gpu_that_is_not_there_is_an_error():
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", "unused"],
        capture_output=True,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr


def test_commit_can_be_passed_to_a_copy_without_git(monkeypatch):
    def fails(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(common.subprocess, "run", fails)
    monkeypatch.delenv("CSD_COMMIT", raising=False)
    assert common.machine()["commit"] is None
    monkeypatch.setenv("CSD_COMMIT", "abc1234")
    assert common.machine()["commit"] == "abc1234"


def test_parity_finds_larger_errors_and_no_chance():
    generator = torch.Generator().manual_seed(0)

    def errors(scale, count):
        return (scale * torch.randn(count, generator=generator).abs()).tolist()

    # of 48 tokens each, as parity compares them
    assert all(parity_logits.within(errors(1, 48), errors(1, 48)) for _ in range(200))
    assert not any(parity_logits.within(errors(4, 48), errors(1, 48)) for _ in range(200))
