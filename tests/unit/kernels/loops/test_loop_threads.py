"""A CPU's loops give the same bits in any number of threads, and to several callers at once."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numba
import pytest
import torch
from helpers.kernels.attention_cases import attention_case
from helpers.kernels.elementwise_cases import normal, rotary_case
from helpers.kernels.tree_cases import random_logits, trees
from helpers.targets import slow

from csd.kernels.attention.cpu import attention
from csd.kernels.layers.cpu import elementwise
from csd.kernels.numba import threads
from csd.kernels.verify.cpu import heads, path

needs_threads = pytest.mark.skipif(
    numba.config.NUMBA_NUM_THREADS < 2, reason="numba has one thread on one core"
)
BF16 = torch.bfloat16


def attend():
    case = attention_case(
        trees=[{3: 7, 1: 2}, {}, {0: 3, 4: 1}],
        prompt=[130, 5, 40],
        committed=[17, 129, 8, 0, 64],
        padding=3,
        heads=(6, 2),
        dtype=BF16,
    )
    return (attention.tree_attention(**case),)


def rotary():
    case = rotary_case(13, 6, 2, 64, BF16)
    return elementwise.rotary(**case), case["node_k"], case["node_v"]


def norm():
    x, weight, residual = (normal(*s, dtype=BF16) for s in ((13, 576), (576,), (13, 576)))
    return elementwise.rms_norm(x, weight, 1e-5, residual)


def passes():
    pool, slots = trees(0, count=5, rows=13, vocab=4099, live=True)
    slots.top_p[::2], slots.top_k[1::2] = 0.9, 20
    x = random_logits(13, 4099).to(BF16)
    found = path.verify_all(x, pool, slots)
    return *(getattr(found, f.name) for f in fields(found)), heads.log_sum(x)


LOOPS = {
    "attention": attend,
    "rotary": rotary,
    "norm": norm,
    "swiglu": lambda: (elementwise.swiglu(normal(13, 3072, dtype=BF16)),),
    "verification": passes,
}
EACH = pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)


@pytest.fixture
def two_threads(monkeypatch):
    """PyTorch's threads in a test, and no loop too short for them; set it to 1 to compare."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "LEAST", 0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def alone(run):
    torch.set_num_threads(1)
    out = run()
    torch.set_num_threads(2)
    return out


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@needs_threads
@EACH
def test_one_thread_or_two(run, two_threads):
    assert threads.threads() == 2
    assert same(run(), alone(run))


@needs_threads
@EACH
def test_four_callers_at_once(run, two_threads):
    want = alone(run)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda: [run() for _ in range(5)]) for _ in range(4)]
        assert all(same(out, want) for job in jobs for out in job.result())


FILL = """
import sys
import numpy as np
import torch
from csd.kernels.numba.jit import loop
from csd.kernels.numba.threads import LEAST, by_threads, parts_for, share

@by_threads
def fill(part, parts, x):
    first, last = share(x.shape[0], part, parts)
    for i in range(first, last):
        x[i] += part + 1

run = fill.run

@loop
def caller(parts, x):
    run(parts, x)

x = np.zeros(5)
if sys.argv[1] == "callee":
    fill(LEAST, x)
else:
    for numbers in map(int, sys.argv[2:]):
        x[:] = 0
        caller(parts_for(numbers), x)
hits = sum(caller.stats.cache_hits.values()) + sum(run.stats.cache_hits.values())
print(int(x.sum()), hits, torch.get_num_threads())
"""


@slow
@needs_threads
def test_a_loop_runs_in_all_threads_whichever_process_compiled_it(tmp_path):
    """A process that reads a loop from the cache links OpenMP; PyTorch keeps its own number of
    threads. Two of five numbers belong to the first of two parts."""
    path = tmp_path / "fill.py"
    path.write_text(FILL)
    given = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[4]),
    }

    def printed(threads, *args):
        env = given | {"OMP_NUM_THREADS": str(threads)}
        ran = subprocess.run([sys.executable, path, *args], env=env, capture_output=True, text=True)
        return ran.stdout.split() or ran.stderr[-500:]

    large = str(threads.LEAST)
    # the sum of what was added, how many loops came from the cache, and PyTorch's threads
    assert printed(2, "callee") == ["8", "0", "2"]
    assert printed(2, "callee") == ["8", "1", "2"]
    assert printed(1, "caller", large) == ["5", "0", "1"]
    assert printed(2, "caller", large) == ["8", "1", "2"]
    assert printed(2, "caller", "1", large) == ["8", "1", "2"]
    assert printed(1, "caller", large) == ["5", "1", "1"]


def test_an_error_in_a_part_is_raised_where_the_loop_is_called():
    @threads.by_threads
    def fails(part, parts, x):
        if part == parts - 1:
            raise ValueError("no")

    for parts in (1, threads.threads()):
        with pytest.raises(RuntimeError, match="a part of a loop failed"):
            fails.run(parts, 0)
