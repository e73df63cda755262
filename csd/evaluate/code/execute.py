"""Tests of programs that a model wrote, each in a process with limits (`child.py`)."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from csd.utils.device import usable_cpus

# results of a program
PASSED, FAILED = "passed", "failed"

CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of a program's process."""

    seconds: int = 10  # of CPU time, and as many more of elapsed time
    memory: int = 2 << 30  # bytes of address space
    file: int = 16 << 20  # bytes of a file


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a problem: source that defines `check`, and the name that it is called with."""

    source: str
    entry_point: str


def outcomes(
    programs: Iterable[str], tests: Suite, limits: ProcessLimits | None = None
) -> dict[str, str]:
    """PASSED or FAILED for each program; equal programs run once.

    As many run at a time as there are usable CPUs. One whose elapsed time ended runs again, alone,
    so that the others do not decide.
    """
    different = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(usable_cpus()) as pool:
        found = list(
            pool.map(partial(_run, tests=tests, limits=limits or ProcessLimits()), different)
        )
    passed = [
        passes(program, tests, limits) if result is None else result
        for program, result in zip(different, found, strict=True)
    ]
    return {p: PASSED if yes else FAILED for p, yes in zip(different, passed, strict=True)}


def passes(program: str, tests: Suite, limits: ProcessLimits | None = None) -> bool:
    """True if a program, run in a process of its own, passes the tests to their last line.

    An error, an exit before the end of the tests, and a limit that is exceeded are a failure.
    """
    return _run(program, tests, limits or ProcessLimits()) or False


def _run(program: str, tests: Suite, limits: ProcessLimits) -> bool | None:
    """Like `passes`; None if the elapsed time ended."""
    token = secrets.token_hex(16)
    header = json.dumps({"limits": asdict(limits), "program": program})
    # the token is the value of the last line of the tests
    end = f"check({tests.entry_point})\n__passed__ = {token!r}"
    job = "\n".join((header, tests.source, end))
    with tempfile.TemporaryDirectory(prefix="csd-", ignore_cleanup_errors=True) as folder:
        # no secrets of the environment, one thread of linear algebra, the same order of sets
        environment = {
            "LANG": "C.UTF-8",
            "MALLOC_ARENA_MAX": "1",  # a thread's own takes 64 MiB of the address space
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "TMPDIR": folder,
        }
        with subprocess.Popen(
            [sys.executable, "-P", "-B", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                written, _ = process.communicate(job.encode(), 2 * limits.seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    return written == token.encode()
