"""Sections as processes, each with the leader's group: what a section began ends with it."""

import os
import signal
import subprocess
import time

# between two looks at whether a process has ended, in seconds
LOOK = 0.05


def run_groups(commands: dict[str, list[str]], seconds: float) -> dict[str, int | None]:
    """Exit codes of processes that run side by side; None for one that time has ended.

    Each leads a group of its own, which is killed with it: when it ends, when it is killed, when
    the seconds are over, and when this process is interrupted.
    """
    end = time.monotonic() + seconds
    running: dict[str, subprocess.Popen] = {}
    codes: dict[str, int | None] = {}
    try:
        for name, command in commands.items():
            running[name] = subprocess.Popen(command, start_new_session=True)
        while running and time.monotonic() < end:
            for name in [name for name, process in running.items() if _has_ended(process)]:
                codes[name] = _end(running.pop(name))
            time.sleep(LOOK)
    finally:
        for name, process in running.items():
            _end(process)
            codes[name] = None
    return codes


def _has_ended(process: subprocess.Popen) -> bool:
    # it is not waited for: until then its number is no other process's
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, look) is not None


def _end(process: subprocess.Popen) -> int:
    """Kill what is left of a process's group; returns the process's exit code."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
