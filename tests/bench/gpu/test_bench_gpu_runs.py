"""Runs of the GPU benchmark: boxes, processes that end, and exit codes."""

import json
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu.plan import BOXES, MINUTES, box, chosen, steps
from bench.gpu.processes import run_groups
from bench.gpu.sections import doctor, equality, parity

pytestmark = pytest.mark.bench


def test_a_section_that_fails_keeps_its_rows_and_stops_no_other(tmp_path, monkeypatch, capsys):
    def run(section):
        section.add(what="first")
        raise FloatingPointError("the second")

    monkeypatch.setattr(equality, "run", run)
    options = ["--out", str(tmp_path), "--device", "cpu", "--only", "equality", "attention"]
    assert gpu.main(options) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["sections"] == {"equality": "failed", "attention": "done"}
    kept = json.loads((tmp_path / "equality.json").read_text())
    assert kept["rows"] == [{"what": "first"}]
    assert kept["error"] == "FloatingPointError: the second"
    assert 'raise FloatingPointError("the second")' in kept["traceback"]


def test_a_section_runs_in_a_process_that_its_box_ends(tmp_path, monkeypatch, capsys):
    options = ["--out", str(tmp_path), "--device", "cpu", "--processes", "--only", "attention"]
    assert gpu.main(options) == 0
    assert json.loads((tmp_path / "attention.json").read_text())["status"] == "done"

    def too_long(commands, seconds):
        ((name, command),) = commands.items()
        assert name == "attention" and BOXES[name][1] - 1 < seconds <= BOXES[name][1]
        assert command[-4:-1:2] == ["--seconds", "--began"] and float(command[-3]) == seconds
        (tmp_path / "attention.json").write_text('{"status": "running", "rows": [{}]}')
        return {name: None}

    monkeypatch.setattr(gpu, "run_groups", too_long)
    capsys.readouterr()
    assert gpu.main([*options, "--minutes", "30"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["sections"] == {"attention": "cut"}
    assert summary["rows"] == {"attention": 1}


@pytest.mark.parametrize("status", ["running", None])
def test_without_parity_the_exit_code_is_1(tmp_path, monkeypatch, status):
    def ends(commands, seconds):
        for name in commands:
            if name != "parity" or status:
                kept = status if name == "parity" else "done"
                (tmp_path / f"{name}.json").write_text(json.dumps(dict(status=kept, rows=[])))
        return dict.fromkeys(commands)

    monkeypatch.setattr(gpu, "run_groups", ends)
    options = ["--out", str(tmp_path), "--device", "cpu", "--processes", "--only", "attention"]
    assert gpu.main(options) == 0
    assert gpu.main([*options, "parity"]) == 1


def test_a_part_without_time_makes_a_section_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "run", lambda section: section.cut_off("the rest"))
    assert gpu.main(["--out", str(tmp_path), "--device", "cpu", "--only", "parity"]) == 1
    assert json.loads((tmp_path / "parity.json").read_text())["status"] == "cut"


@pytest.mark.parametrize("minutes", MINUTES)
def test_section_times_add_up_to_the_limit(minutes):
    names = chosen(minutes)
    planned = steps(names, minutes)
    # imports and the report are this process's
    assert planned[-1].closes <= 60 * minutes - 10
    assert [name for step in planned for name in step.sections] == names
    assert planned[0].sections == ["doctor", "compile"]
    closes = [0, *(step.closes for step in planned)]
    for step, before, after in zip(planned, closes, closes[1:], strict=False):
        assert {box(name, minutes) for name in step.sections} == {after - before}


def test_time_that_is_left_goes_to_the_next_section(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(gpu, "run_apart", lambda args, names, seconds: given.append(seconds))
    options = ["--out", str(tmp_path), "--device", "cpu", "--processes"]
    gpu.main([*options, "--only", "prefill", "first_call"])
    prefill, first_call = BOXES["prefill"][0], BOXES["first_call"][0]
    assert given == pytest.approx([prefill, prefill + first_call], abs=1)


def test_a_section_ends_before_its_box_closes(tmp_path, monkeypatch):
    boxes = []
    monkeypatch.setattr(gpu.time, "time", lambda: 1002.0)
    monkeypatch.setattr(equality, "run", lambda section: boxes.append(section.box))
    options = ["--out", str(tmp_path), "--device", "cpu", "--section", "equality"]
    assert gpu.main([*options, "--seconds", "50", "--began", "1000"]) == 0
    assert boxes == [50 - 2 - gpu.GRACE]


def test_a_section_that_dies_has_failed(tmp_path, monkeypatch, capsys):
    def dies(commands, seconds):
        (tmp_path / "attention.json").write_text('{"status": "running", "rows": [{}]}')
        return {"attention": -11}

    monkeypatch.setattr(gpu, "run_groups", dies)
    options = ["--out", str(tmp_path), "--device", "cpu", "--processes", "--only", "attention"]
    assert gpu.main(options) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["sections"] == {"attention": "failed"} and summary["rows"] == {"attention": 1}
    assert "code -11" in json.loads((tmp_path / "attention.json").read_text())["error"]


@pytest.mark.parametrize(
    ("end", "code"),
    [("time.sleep(600)", None), ("os.kill(os.getpid(), 9)", -9), ("sys.exit(3)", 3)],
    ids=["time is over", "killed", "ended"],
)
def test_processes_of_a_section_end_with_it(tmp_path, end, code):
    path = tmp_path / "child"
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(path)!r}, 'w').write(str(child.pid))\n{end}"
    )
    seconds = 1.5 if code is None else 60
    assert run_groups({"it": [sys.executable, "-c", program]}, seconds) == {"it": code}
    # nobody may have looked at how it ended yet
    state = Path(f"/proc/{path.read_text()}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child of the section's process is still running")


def test_an_error_of_the_doctor_is_a_result(tmp_path, monkeypatch, capsys):
    wrong = {"checks": [dict(name="verify", calls=3, error="2 of 9 wrong")]}
    monkeypatch.setattr(doctor, "examined", lambda section, job: wrong)
    options = ["--out", str(tmp_path), "--device", "cpu", "--only", "doctor", "attention"]
    assert gpu.main(options) == 1
    output = capsys.readouterr().out
    summary = json.loads(output.splitlines()[-1])
    assert summary["sections"] == {"doctor": "failed", "attention": "done"}
    assert "doctor failed: RuntimeError: tiny, float32: verify: 2 of 9 wrong" in output
    (row,) = json.loads((tmp_path / "doctor.json").read_text())["rows"]
    assert not row["passed"]
