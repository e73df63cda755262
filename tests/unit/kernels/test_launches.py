"""Launches of a static step compile as launched, and are those that `make aot` compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.kernels.step_kernels import STEP
from helpers.targets import slow

from bench.gpu.aot import TARGETS

ROOT = Path(__file__).parents[3]
# the Triton of torch 2.10 and 2.11
OLDER = ROOT / "build" / "triton-3.6"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 16), id="one slot"),
        pytest.param((5, 64), id="five slots", marks=slow),
        pytest.param((1, 16, "bench"), id="Triton 3.6, compiled by bench.gpu", marks=slow),
    ],
)
def launches(request, tmp_path_factory):
    """Launches of two equal steps, a list each."""
    path, older = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "bench" in request.param
    if older and not OLDER.is_dir():
        pytest.skip(f"needs {OLDER.relative_to(ROOT)}: make triton-3.6")
    if older:
        path = f"{OLDER}:{path}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unit/kernels/launches.py"), *map(str, request.param)],
        env=os.environ
        | {
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": path,
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        },
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    steps = [[]]
    for row in map(json.loads, done.stdout.splitlines()):
        steps[-1].append(row) if row else steps.append([])
    assert steps.pop() == []
    assert {row["triton"].startswith("3.6.") for row in steps[0]} == {older}
    return steps


def test_every_launch_compiles_and_fits(launches):
    first, _ = launches
    # an integer that is 1 is another specialisation than the one compiled ahead of time
    assert [row["kernel"] for row in first] == [
        f"{name}_kernel" for names in STEP.values() for name in names
    ]
    assert all(row["shared"] <= TARGETS["sm_90"].shared for row in first)
    assert all(min(row["grid"]) >= 1 for row in first)
    # what Triton would ask an allocator for, which nobody has set
    assert not any(row["scratch"] for row in first)


def test_what_is_launched_is_what_is_compiled_ahead_of_time(launches):
    # types, alignment, constexprs, warps: a launch finds the binary in Triton's cache
    other = [row for row in launches[0] if not row["ahead"]]
    assert not other


def test_a_launch_finds_the_binary_that_other_processes_compiled(launches):
    assert not [row["kernel"] for row in launches[0] if not row["kept"]]


def test_a_step_that_ran_once_compiles_nothing_more(launches):
    # a kernel compiled during a capture would end it
    first, second = ([(r["kernel"], r["binary"], r["grid"]) for r in step] for step in launches)
    assert second == first
