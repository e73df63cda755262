"""On a CPU an engine compiles a step's loops before it times steps, and none within a step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.targets import slow

from csd.kernels.common.cpu import compiles

pytestmark = pytest.mark.skipif(not compiles(), reason="the references run on this CPU")

# prints the loops that steps of calls compile, or read from the cache, for the first time
CALLS = """
import sys
from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages

import torch
from numba.core.dispatcher import Dispatcher

import csd
from bench.lib.shapes import SHAPES, random_model
from csd.engine.first_call.compile_loops import compile_step_loops
from csd.engine.step.step import Step
from csd.engine.first_call.time_steps import sizes_to_time
from csd import kernels
from csd.kernels.numba import threads

VOCAB = 4099
NAMES = [x.name for x in walk_packages(kernels.__path__, "csd.kernels.")]
MODULES = [import_module(x) for x in NAMES if ".cpu." in x or ".numba." in x]
CASES = dict(
    flat=dict(temperature=5.0), likely=dict(temperature=0.2), greedy=dict(temperature=0),
    filtered=dict(temperature=1.0, top_p=0.9), penalised=dict(repetition_penalty=1.2),
    early=dict(min_new_tokens=9, stop_token_ids=[7]),
)
# one row is for one thread, and many are for two
threads.LEAST = 2 * VOCAB
FEW_AND_MANY = [sizes_to_time(4, False)[i] for i in (0, -1)]
launch, new = Step.launch, []

def loops():
    named = [x for module in MODULES for x in vars(module).values()]
    twins = [x for x in named if isinstance(x, threads.ByThreads)]
    named += [loop for x in twins for loop in (x.part, x.run)]
    return {
        (x.py_func.__qualname__, types)
        for x in named if isinstance(x, Dispatcher)
        for types in (*x.overloads, *getattr(x, "parts", ()))
    }

def watched(*args):
    before = loops()
    found = launch(*args)
    new.extend(sorted(name for name, _ in loops() - before))
    return found

def compile_layers(engine):
    step = engine.caches.small_step(FEW_AND_MANY[-1])
    step.drafting = False
    step.slots.group.zero_()
    for rows in FEW_AND_MANY:
        step.slots.live[:rows] = True
        step.forward(step.ops.roots(step.slots, rows))

Step.launch = watched
model = random_model(replace(SHAPES["tiny"], vocab=VOCAB), dtype=getattr(torch, sys.argv[1]))
with csd.Engine(model, max_slots=4) as engine:
    if sys.argv[2] == "beside":
        compile_layers(engine)
        compile_step_loops(engine.dtype, VOCAB, FEW_AND_MANY[-1])
        before = loops()
        engine.step_times.measure()
        print(*sorted(name for name, _ in loops() - before))
        sys.exit()
    if sys.argv[2] == "timed":
        engine.step_times.measure()
    # nodes of its own: nothing else times steps
    for given in CASES.values():
        for n in (1, 4):
            engine.generate([5, 6, 7], num_samples=n, max_new_tokens=16, seed=0, budget=8, **given)
print(*new)
"""


def compiled(tmp_path, dtype, timed, threads):
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    given = {"PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, path, dtype, timed]
    ran = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.split()


# loops of two threads take long to compile, and no other test needs all of them: of one dtype
@slow
@pytest.mark.parametrize("dtype,threads", [("float32", 1), ("bfloat16", 2)])
def test_steps_compile_nothing_once_steps_have_been_timed(dtype, threads, tmp_path):
    assert compiled(tmp_path, dtype, "timed", threads) == []


# without it, the test above could not fail
@slow
def test_steps_compile_loops_where_none_has_been_timed(tmp_path):
    # what samples a row, what drafts and what commits
    loops = compiled(tmp_path, "float32", "untimed", 1)
    assert {"_begin", "_draft", "_commit_kv"} <= set(loops)


@slow
def test_a_second_process_compiles_all_but_the_layers(tmp_path):
    assert compiled(tmp_path, "bfloat16", "beside", 2) == []
