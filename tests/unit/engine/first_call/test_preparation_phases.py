"""A line on stderr about what takes long, and none about what does not."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from csd.engine.step.step import Clock
from csd.utils import phases
from csd.utils.phases import phase, showing


@pytest.mark.parametrize("device, line", [("cuda", True), ("cpu", False)])
def test_slow_phases_print_a_line_on_a_gpu(device, line, monkeypatch, capsys):
    times = iter([0.0, 2.5])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(times))
    with phase("measure steps", torch.device(device)):
        pass
    assert capsys.readouterr().err == ("csd: measure steps: 2.5 s\n" if line else "")


def test_phases_are_shown_where_progress_is_asked_for(capsys):
    with showing(True), phase("loading m", None):
        assert capsys.readouterr().err == "csd: loading m ...\n"
    assert re.fullmatch(r"csd: loading m: \d\.\d s\n", capsys.readouterr().err)
    # not on a terminal
    with showing(None), phase("loading m", None):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("shell", [None, object()], ids=["none", "shell"])
def test_progress_is_shown_in_ipython_by_default(shell, monkeypatch, capsys):
    """A notebook's standard error is no terminal; its kernel has a shell."""
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    shown = shell is not None
    assert phases.wants_progress(None) is shown
    assert phases.wants_progress(True) and not phases.wants_progress(False)
    with showing(None), phase("loading m", None):
        pass
    assert bool(capsys.readouterr().err) is shown
    monkeypatch.delitem(sys.modules, "IPython")
    assert not phases.wants_progress(None) and "IPython" not in sys.modules
    # standard error may be closed
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(sys, "stderr", None)
    assert not phases.wants_progress(None)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_whole_lines_in_a_log(terminal, monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with showing(True), phase("loops", None):
        for now in range(1, 25):
            phases.note(f"{now} compiled")
        now = 25.0
    text = capsys.readouterr().err
    if terminal:
        assert text.count("\n") == 1 and text.count("\r") == 24
        assert text.split("\r")[-1] == "csd: loops: 24 compiled 25.0 s\n"
    else:
        assert text == (
            "csd: loops ...\ncsd: loops: 11 compiled ...\ncsd: loops: 22 compiled ...\n"
            "csd: loops: 25.0 s\n"
        )


def test_time_counts_once(monkeypatch):
    """A phase within one of another kind counts as its own kind alone."""
    now = 0.0
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now)
    before = phases.preparation()
    with phase("", None, kind="compile"):
        now = 1.0
        with phase("", None, kind="measure"):
            now = 3.0
            phases.begin("compile")
            now = 7.0
            phases.end()
            now = 8.0
        now = 10.0
    found = {k: v - before[k] for k, v in phases.preparation().items()}
    assert found == {"compile": 1 + 4 + 2, "measure": 2 + 1}


def test_a_step_does_not_count_what_compiles_in_it(monkeypatch):
    now = 0.0
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now)
    seconds = {"compile": 0.0, "measure": 0.0, "forward": 0.0}
    clock = Clock(seconds)
    now = 1.0
    phases.begin("compile")
    now = 5.0
    phases.end()
    now = 6.0
    clock.lap("forward")
    assert seconds == {"compile": 4.0, "measure": 0.0, "forward": 2.0}


def test_announced_phases_print_one_line_even_on_failure(capsys):
    with pytest.raises(ValueError), phase("check", torch.device("cuda"), "checking"):
        assert capsys.readouterr().err == "csd: checking ...\n"
        raise ValueError
    assert capsys.readouterr().err.endswith(" s\n")
