"""Calls of a lent GPU: boxes within the call's time, one file of all results, a second call."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.targets import few

from bench.gpu import __main__ as gpu
from bench.gpu import calls
from bench.gpu.calls import CALLS, SECONDS, Gathered, plan
from bench.gpu.lib.section import Section
from bench.gpu.sections import doctor, equality, parity, prefill

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
NAMES = {call: [n for together, _ in steps for n in together] for call, steps in CALLS.items()}


def ended(**of_calls):
    """ended(c1={"doctor": "failed"}): results by CALL/SECTION; others of these calls are done."""
    return {
        f"{call[1:]}/{name}": {"section": name, "status": others.get(name, "done"), "rows": [{}]}
        for call, others in of_calls.items()
        for name in NAMES[int(call[1:])]
    }


def shown(steps):
    return [(step.call, step.sections) for step in steps]


@pytest.mark.parametrize("call", CALLS)
def test_boxes_fill_the_time_that_the_call_has(call):
    steps = plan(call, {})
    assert steps[-1].closes == SECONDS[call]
    assert shown(steps) == [(call, list(together)) for together, _ in CALLS[call]]
    begins = [0, *(step.closes for step in steps)]
    boxes = [box for _, box in CALLS[call]]
    assert [b - a for a, b in pairwise(begins)] == boxes


def test_both_calls_and_their_starts_take_a_quarter_of_an_hour():
    start, transfer = 120, 15
    assert sum(SECONDS.values()) + 2 * (start + transfer) < 15 * 60
    # a machine that is started once more, and a step that ends late
    assert max(SECONDS.values()) + start < 10 * 60


def test_a_second_call_begins_with_what_failed_and_leaves_out_what_is_done():
    earlier = ended(c1=dict(parity="failed", attention="cut", products="running"))
    del earlier["1/continuous"]
    steps = plan(2, earlier)
    # failed; not reached, or running when the machine was taken back; its own; cut
    assert shown(steps)[:4] == [
        (1, ["parity"]),
        (1, ["continuous"]),
        (1, ["products"]),
        (2, ["doctor", "compile"]),
    ]
    assert shown(steps)[-1] == (1, ["attention"])
    # half a proof is none
    for name in ("doctor", "parity"):
        steps = plan(2, ended(c1={name: "cut", "products": "failed", "end_to_end": "cut"}))
        assert shown(steps)[:2] == [(1, [name]), (1, ["products"])]
    # without an earlier call, or when it is done, its own sections alone
    own = [(2, list(together)) for together, _ in CALLS[2]]
    assert shown(plan(2, {})) == shown(plan(2, ended(c1={}))) == own
    # a section that failed brings back none of those beside it
    assert shown(plan(1, ended(c1=dict(doctor="failed")))) == [(1, ["doctor"])]
    assert plan(2, ended(c1={}, c2={})) == []


def test_no_state_of_an_earlier_call_makes_a_call_too_long():
    rng, states = random.Random(0), ["done", "failed", "cut", "running", None]
    for _ in range(300):
        earlier = {
            f"{call}/{name}": {"status": rng.choice(states)}
            for call in CALLS
            for name in NAMES[call]
            if rng.random() < 0.9
        }
        call = rng.choice([1, 2])
        steps, now, boxes = plan(call, earlier), 0.0, []
        for step in steps:
            # a step ends by itself, or is ended when its box closes
            if step.closes - now >= step.least:
                boxes.append(step.closes - now)
                now += rng.choice([0.1, 1.0]) * boxes[-1]
        assert now <= SECONDS[call] and all(box > 0 for box in boxes)
        planned = [f"{s.call}/{name}" for s in steps for name in s.sections]
        assert sorted(planned) == sorted(
            f"{number}/{name}"
            for number in range(1, call + 1)
            for name in NAMES[number]
            if earlier.get(f"{number}/{name}", {}).get("status") != "done"
        )


def test_only_some_sections():
    assert shown(plan(2, {}, ["equality", "attention"])) == [(2, ["equality"])]
    earlier = ended(c1=dict(attention="failed", parity="failed"))
    assert shown(plan(2, earlier, ["equality", "attention"])) == [
        (1, ["attention"]),
        (2, ["equality"]),
    ]


def quick(monkeypatch, **runs):
    """Sections of call 2 that run at once; those of `runs` call these functions."""
    for module in (doctor, equality, prefill):
        name = module.__name__.rpartition(".")[2]
        run = runs.get(name, lambda section: section.add(what="row", call=section.call))
        monkeypatch.setattr(module, "run", run)
    short = {1: ((("doctor",), 5),), 2: ((("equality",), 5), (("prefill",), 5))}
    monkeypatch.setattr(calls, "CALLS", short)


def test_two_calls(tmp_path, monkeypatch, capsys):
    def fails(section):
        section.add(what="first")
        raise ValueError("second")

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    options = ["--device", "cpu", "--out", str(tmp_path / "out"), "--into"]
    quick(monkeypatch, doctor=fails)
    assert gpu.main([*options, str(first), "--call", "1"]) == 1
    saved = json.loads(first.read_text())
    assert saved["1/doctor"]["rows"] == [{"what": "first"}]
    assert 'raise ValueError("second")' in saved["1/doctor"]["traceback"]
    assert saved["summary"]["sections"] == {"1/doctor": "failed"}
    quick(monkeypatch)
    capsys.readouterr()
    options[3] = str(tmp_path / "other")
    assert gpu.main([*options, str(second), "--call", "2", "--kept", str(first)]) == 0
    printed = capsys.readouterr().out
    order = [
        printed.index(f"call {what} ..") for what in ("1: doctor", "2: equality", "2: prefill")
    ]
    assert order == sorted(order)
    saved = json.loads(second.read_text())
    assert {k: v["rows"] for k, v in saved.items() if "/" in k} == {
        "1/doctor": [{"what": "row", "call": 1}],
        "2/equality": [{"what": "row", "call": 2}],
        "2/prefill": [{"what": "row", "call": 2}],
    }
    # a third one has nothing to do, and its file still has all
    assert gpu.main([*options, str(second), "--call", "2", "--kept", str(second)]) == 0
    again = json.loads(second.read_text())
    assert {k: v for k, v in again.items() if "/" in k} == {
        k: v for k, v in saved.items() if "/" in k
    }


def test_what_a_call_has_no_time_for_is_in_its_summary(tmp_path, monkeypatch, capsys):
    quick(monkeypatch, equality=lambda section: time.sleep(1.6))
    monkeypatch.setattr(calls, "SECONDS", {2: 4})
    options = ["--device", "cpu", "--out", str(tmp_path), "--call", "2"]
    assert gpu.main(options) == 0
    assert "left out for lack of time: 2/prefill" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["sections"] == {"2/equality": "done"} and summary["call"] == 2
    assert summary["left out"] == ["no time: 2/prefill"]


def test_a_call_whose_parity_is_not_complete_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "CALLS", {1: ((("parity",), 5),)})
    monkeypatch.setattr(parity, "run", lambda section: section.cut_off("the rest"))
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--call", "1"]) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--kept", "x.json"], "--kept needs --call"),
        (["--call", "2", "--kept", "x.json"], "there is no x.json"),
        (["--call", "1", "--minutes", "30"], "not allowed with"),
        (["--call", "3"], "invalid choice: 3"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, monkeypatch, capsys, options, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--out", "out", *options])
    assert error in capsys.readouterr().err


# a section that adds rows until it is ended, in a process of its own as on a GPU
ENDLESS = """
import sys, time
from bench.gpu import __main__ as gpu, calls
from bench.gpu.sections import prefill

calls.CALLS = {1: ((("prefill",), 60),)}


def run(section):
    for i in range(10_000):
        section.add(row=i)
        time.sleep(0.01)


if "--section" in sys.argv:
    prefill.run = run
else:
    started = gpu.run_groups
    gpu.run_groups = lambda commands, seconds: started(
        {n: [sys.executable, __file__, *c[3:]] for n, c in commands.items()}, seconds
    )
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sys.exit(gpu.main(sys.argv[1:]))
"""


@few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_run_that_is_killed_leaves_all_rows_so_far(tmp_path, number):
    program, into = tmp_path / "endless.py", tmp_path / "into.json"
    program.write_text(ENDLESS)
    command = [sys.executable, str(program), "--device", "cpu", "--processes", "--call", "1"]
    command += ["--out", str(tmp_path / "out"), "--into", str(into)]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT)
    child = None
    try:
        rows = []
        end = time.monotonic() + 120
        while len(rows) < 8 and time.monotonic() < end:
            # at every moment, it is there and whole
            whole = json.loads(into.read_text()) if into.exists() else {}
            rows = whole.get("1/prefill", {}).get("rows", [])
            time.sleep(0.005)
        assert len(rows) >= 8
        (child,) = children(process.pid)
        process.send_signal(number)
        process.wait(30)
        written = json.loads((tmp_path / "out" / "1" / "prefill.json").read_text())["rows"]
        saved = json.loads(into.read_text())["1/prefill"]["rows"]
        assert saved == written[: len(saved)] and len(saved) >= len(rows)
        if number == signal.SIGTERM:
            assert saved == written
    finally:
        process.kill()
        process.wait()
        if child is not None and number == signal.SIGKILL:
            os.killpg(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_results_that_are_being_written_are_read_later(tmp_path):
    into, path = tmp_path / "all.json", tmp_path / "1" / "attention_shapes.json"
    path.parent.mkdir()
    (tmp_path / "1" / "doctor.json").write_text('{"of": "an earlier run"}')
    results = Gathered(tmp_path, into, {"1/parity": {"status": "done"}})
    assert json.loads(into.read_text()) == {"1/parity": {"status": "done"}}
    path.write_text('{"rows": [')
    results.update()
    assert list(json.loads(into.read_text())) == ["1/parity"]
    path.write_text('{"rows": []}')
    results.update()
    (tmp_path / "summary.json").write_text("{}")
    results.update()
    # the file itself lies in the folder, and is no result
    assert json.loads(into.read_text()) == {
        "1/parity": {"status": "done"},
        "1/attention_shapes": {"rows": []},
        "summary": {},
    }


def test_a_file_that_is_replaced_at_once_is_read_again(tmp_path):
    """Two writes within one tick of the file system's clock have one time."""
    section = Section("doctor", tmp_path, None, 1.0)
    results = Gathered(tmp_path, tmp_path / "into", {})
    for i in range(20):
        section.add(row=i)
        os.utime(tmp_path / "doctor.json", ns=(5, 5))
        results.update()
        assert len(json.loads((tmp_path / "into").read_text())["doctor"]["rows"]) == i + 1
