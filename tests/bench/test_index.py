"""`python -m bench`: a line for each benchmark, and each by its name."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import commands, index

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_index_lists_every_command_once():
    lines = [line.split()[0] for line in index().splitlines() if line.startswith("  ")]
    assert sorted(lines) == sorted(commands())
    assert {"cpu", "long", "gpu", "aot", "kernels", "replay", "limits"} <= set(lines)


def test_without_a_name():
    done = run()
    assert done.returncode == 0 and index() in done.stdout


def test_a_name_runs_its_file():
    done = run("replay", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: python -m bench replay" in done.stdout


def test_an_unknown_name():
    done = run("replya")
    assert done.returncode == 2
    assert "NAME must be one of" in done.stderr and "got replya" in done.stderr
