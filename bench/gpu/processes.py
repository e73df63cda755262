"""Sections as processes, each the leader of a process group, whose members end with it."""

import os
import signal
import subprocess
import time

# seconds between two polls of a process
LOOK = 0.05


def run_groups(commands: dict[str, list[str]], seconds: float) -> dict[str, int | None]:
    """Run processes side by side; returns exit codes, None for those killed at the time limit.

    Each leads its own process group, which is killed when the process ends or is killed, when the
    seconds are over, and when this process is interrupted.
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
    # without `wait`: until it is called, no other process can get the id
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, look) is not None


def _end(process: subprocess.Popen) -> int:
    """Kill the rest of a process's group; returns the process's exit code."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
