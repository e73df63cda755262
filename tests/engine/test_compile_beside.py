"""A second process compiles what steps run beside the layers, while the first compiles those."""

import json
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

pytest.importorskip("numba")
import numba

from csd.cpu import entry as module
from csd.engine import compile_beside, own_python


class Process:
    """In place of a process: notes how it was begun, and whether it was waited for or ended."""

    made: ClassVar[list] = []
    code = 0

    def __init__(self, command, env, **streams):
        self.command, self.env, self.did = command, env, []
        assert {*streams.values()} == {subprocess.DEVNULL}
        Process.made.append(self)

    def wait(self):
        self.did.append("wait")
        return self.code

    def kill(self):
        self.did.append("kill")


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(module, "threads", lambda: 2)
    monkeypatch.setattr(Process, "made", [])
    return Process.made


def compiles(name="csd.cpu.some"):
    def one():
        return 1

    one.__module__ = name
    assert numba.njit(one)() == 1


def beside():
    return compile_beside.compiled_beside(torch.bfloat16, 49, [1, 12])


def test_one_process_begins_with_the_first_loop_and_is_waited_for(processes):
    with beside():
        assert not processes
        compiles("user.loops")
        assert not processes
        compiles()
        compiles()
        assert len(processes) == 1 and processes[0].did == []
    assert processes[0].did[0] == "wait"
    compiles()
    assert len(processes) == 1


def test_its_command_says_what_to_compile(processes, monkeypatch):
    with beside():
        compiles()
    job = processes[0].command[-1]
    assert processes[0].command == own_python.command("csd.engine.compile_beside", [job])
    given, before = [], torch.get_num_threads()
    monkeypatch.setattr(compile_beside, "compile_others", lambda *args: given.append(args))
    compile_beside.main([job])
    assert given == [(torch.bfloat16, 49, [1, 12])]
    assert json.loads(job)["threads"] == torch.get_num_threads() == before


def test_no_process_where_all_is_compiled_or_there_is_one_thread(processes, monkeypatch):
    with beside():
        pass
    monkeypatch.setattr(module, "threads", lambda: 1)
    with beside():
        compiles()
    assert not processes


def test_a_process_that_fails_is_logged_and_one_of_a_call_that_fails_is_ended(
    processes, monkeypatch, caplog
):
    with pytest.raises(KeyboardInterrupt), beside():
        compiles()
        raise KeyboardInterrupt
    assert processes[0].did == ["kill", "wait"] and not caplog.records
    monkeypatch.setattr(Process, "code", 1)
    with beside():
        compiles()
    assert "compiles loops has failed" in caplog.text


def test_where_no_process_can_begin_the_call_goes_on(processes, monkeypatch, caplog):
    def refuse(*args, **streams):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with beside():
        compiles()
    assert "no more processes" in caplog.text
    caplog.clear()
    for name in ("executable", "compiles"):
        with monkeypatch.context() as patch:
            if name == "executable":
                patch.setattr(sys, "executable", "")
            else:
                # numba is not there to be asked
                patch.setattr(compile_beside, "compiles", lambda: False)
                patch.setitem(sys.modules, "csd.cpu.entry", None)
            with beside():
                compiles()
    assert not caplog.records
