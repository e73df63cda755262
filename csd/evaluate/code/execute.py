"""Tests of programs that a model wrote, each in a process with limits (`child.py`)."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# results of a program
PASSED, FAILED = "passed", "failed"

CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program's process."""

    seconds: int = 10  # of CPU time, and as many more of elapsed time
    memory: int = 2 << 30  # bytes of address space
    file: int = 16 << 20  # bytes of a file


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a problem: source that defines `check`, and the name that it is called with."""

    source: str
    entry_point: str


def passes(program: str, tests: Suite, limits: Limits | None = None) -> bool:
    """True if a program, run in a process of its own, passes the tests to their last line.

    An error, an exit before the end of the tests, and a limit that is exceeded are a failure.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "test": tests.source,
        "entry_point": tests.entry_point,
        "token": token,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "file": limits.file,
    }
    with tempfile.TemporaryDirectory(prefix="csd-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            # no secrets of the environment, and one thread of linear algebra
            env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(job).encode())
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * limits.seconds)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with process.stdout as pipe:
            # a process that left the group may still hold the other end open
            os.set_blocking(pipe.fileno(), False)
            return (pipe.read(len(token) + 1) or b"") == token.encode()
