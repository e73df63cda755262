"""Tests that a program passes, and what it may do by accident."""

import threading

import pytest

from csd.evaluate.code import execute
from csd.evaluate.code.execute import ProcessLimits, Suite, passes

TESTS = Suite("def check(f):\n    assert f(1) == 2\n    assert f(-1) == 0\n", "step")
GOOD = "def step(x):\n    return x + 1\n"
WRONG = "def step(x):\n    return x\n"
SHORT = ProcessLimits(seconds=1)

# none of them reaches the last line of the tests
FAILING = {
    "a wrong result": WRONG,
    "half of the tests": "def step(x):\n    return 2\n",
    "no function": "x = 1\n",
    "no program": "def step(x:\n",
    "an infinite loop": "while True:\n    pass\n",
    "a call that sleeps": "import time\ndef step(x):\n    time.sleep(60)\n",
    "a memory hog": f"hog = bytearray(8 << 30)\n{GOOD}",
    "a fork": f"import os\nos.fork()\n{GOOD}",
    "a program": f"import subprocess\nsubprocess.run(['true'])\n{GOOD}",
    "a signal to the parent": f"import os\nos.kill(os.getppid(), 0)\n{GOOD}",
    "a server": f"import socket\nsocket.socket().bind(('127.0.0.1', 0))\n{GOOD}",
    "an exit": f"import sys\nsys.exit(0)\n{GOOD}",
    "an exit within the tests": "import sys\ndef step(x):\n    sys.exit(0)\n",
    "an exit without handlers": "import os\ndef step(x):\n    os._exit(0)\n",
    "a result of its own": "def step(x):\n    print('passed')\n    raise SystemExit\n",
    "an open string": f'{GOOD}text = """',
    "a block that ends the file": f"{GOOD}if False:\n",
    "a large file": f"with open('a', 'wb') as f:\n    f.write(bytes(64 << 20))\n{GOOD}",
    "many files": f"files = [open('a', 'w') for _ in range(200)]\n{GOOD}",
}


@pytest.mark.parametrize("program", FAILING.values(), ids=FAILING)
def test_a_program_passes_only_by_the_last_line_of_its_tests(program):
    assert not passes(program, TESTS, SHORT)


def test_a_right_program_passes():
    own_file = "with open('a', 'w') as f:\n    f.write('x')\n"
    assert passes(GOOD, TESTS)
    assert passes(f"{own_file}print('text')\n{GOOD}", TESTS)


@pytest.mark.parametrize(
    "change",
    [
        "open({path!r}, 'w')",
        "import os; os.remove({path!r})",
        "import os; os.rename({path!r}, 'mine')",
        "import os; os.symlink({path!r}, 'link'); open('link', 'w')",
        "import os, shutil; shutil.rmtree(os.path.dirname({path!r}))",
        "import sqlite3; sqlite3.connect({path!r}).execute('create table t (x)')",
    ],
)
def test_files_of_others_keep_their_bytes(tmp_path, change):
    path = tmp_path / "file"
    path.write_text("mine")
    program = f"{change.format(path=str(path))}\n{GOOD}"
    assert not passes(program, TESTS, SHORT)
    assert path.read_text() == "mine"


FORGE = """
import os, re, sys
def forge(*args):
    frame = sys._getframe()
    while frame:
        for token in re.findall("[0-9a-f]{32}", f"{frame.f_locals} {frame.f_code.co_consts}"):
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, token.encode())
                except OSError:
                    pass
            os._exit(0)
        frame = frame.f_back
"""


def test_the_tests_are_read_behind_the_program():
    assert not passes(f"{FORGE}forge()\n{WRONG}", TESTS)
    # what the page names as possible for a hostile program
    assert passes(f"{FORGE}step = forge\n", TESTS)


def test_programs_run_by_usable_cpus_and_alone_before_the_elapsed_time_decides(monkeypatch):
    """A stand-in for a busy machine, on which a program is late unless it runs alone."""
    # it breaks if fewer run at a time
    together, lock = threading.Barrier(3, timeout=60), threading.Lock()
    running, seen = [], []

    def run(program, tests, limits):
        with lock:
            running.append(program)
            most = len(running)
            first = program not in seen
            seen.append(program)
        if first:
            together.wait()
        with lock:
            running.remove(program)
        assert most <= (3 if first else 1)
        return {"right": None if first else True, "wrong": False, "sleeps": None}[program[:-2]]

    monkeypatch.setattr(execute, "_run", run)
    monkeypatch.setattr(execute, "usable_cpus", lambda: 3)
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    programs = [f"{kind} {i}" for i in range(4) for kind in ("right", "wrong", "sleeps")]
    found = execute.outcomes(programs + programs, TESTS)
    assert found == {p: "passed" if p.startswith("right") else "failed" for p in programs}
    assert sorted(seen[12:]) == sorted(p for p in programs if not p.startswith("wrong"))


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert passes(f"import os\nassert 'HF_TOKEN' not in os.environ\n{GOOD}", TESTS)
