"""A second process compiles the loops of a step, while the first compiles those of its layers."""

import json
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

pytest.importorskip("numba")
import numba

from csd.engine.first_call import compile_loops as parallel_compile
from csd.kernels import cpu_ops as module
from csd.utils import isolated_python


class Process:
    """Fake process: records its command, and calls of wait and kill."""

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


def compiles(name="csd.kernels.numba.some"):
    def one():
        return 1

    one.__module__ = name
    assert numba.njit(one)() == 1


def in_parallel():
    return parallel_compile.compile_in_parallel(torch.bfloat16, 49, 12)


def test_first_compiled_loop_starts_one_process_and_the_block_waits_for_it(processes):
    with in_parallel():
        assert not processes
        compiles("user.loops")
        assert not processes
        compiles()
        compiles()
        assert len(processes) == 1 and processes[0].did == []
    assert processes[0].did[0] == "wait"
    compiles()
    assert len(processes) == 1


def test_command_holds_the_job(processes, monkeypatch):
    with in_parallel():
        compiles()
    job = processes[0].command[-1]
    assert processes[0].command == isolated_python.command(
        "csd.engine.first_call.compile_loops", [job]
    )
    given, before = [], torch.get_num_threads()
    monkeypatch.setattr(parallel_compile, "compile_step_loops", lambda *args: given.append(args))
    parallel_compile.main([job])
    assert given == [(torch.bfloat16, 49, 12)]
    assert json.loads(job)["threads"] == torch.get_num_threads() == before


def test_no_process_without_compilation_or_with_one_thread(processes, monkeypatch):
    with in_parallel():
        pass
    monkeypatch.setattr(module, "threads", lambda: 1)
    with in_parallel():
        compiles()
    assert not processes


def test_failed_processes_are_logged_and_failed_calls_kill_theirs(processes, monkeypatch, caplog):
    with pytest.raises(KeyboardInterrupt), in_parallel():
        compiles()
        raise KeyboardInterrupt
    assert processes[0].did == ["kill", "wait"] and not caplog.records
    monkeypatch.setattr(Process, "code", 1)
    with in_parallel():
        compiles()
    assert "compiles kernels has failed" in caplog.text


def test_calls_continue_without_a_process(processes, monkeypatch, caplog):
    def refuse(*args, **streams):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with in_parallel():
        compiles()
    assert "no more processes" in caplog.text
    caplog.clear()
    for name in ("executable", "compiles"):
        with monkeypatch.context() as patch:
            if name == "executable":
                patch.setattr(sys, "executable", "")
            else:
                # numba is not installed
                patch.setattr(parallel_compile, "compiles", lambda: False)
                patch.setitem(sys.modules, "csd.kernels.cpu_ops", None)
            with in_parallel():
                compiles()
    assert not caplog.records
