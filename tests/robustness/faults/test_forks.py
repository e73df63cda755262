"""A child that is forked while a thread of the parent is in a call draws the same samples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.targets import slow

TESTS = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import csd, torch
from helpers.models import checkpoints

model = checkpoints.build("llama", dtype=torch.float64)
history = csd.History()
options = dict(num_samples=3, max_new_tokens=6, seed=0)
want = csd.generate(model, [5, 6, 7], **options).tokens
running = threading.Event()
other = threading.Thread(target=lambda: csd.generate(
    model, [8, 9], num_samples=4, max_new_tokens=60, end_token_ids=[], seed=1,
    callback=lambda *_: (running.set(), time.sleep(0.01)),
))
if {own}:
    stream = csd.stream(model, [8, 9], num_samples=4, max_new_tokens=400, seed=1)
    next(stream)
else:
    other.start()
    running.wait()
with history._lock:
    child = os.fork()
if not child:
    signal.alarm(60)
    if {own}:
        stream.close()
    history.add([5, 6, 7], want)
    out = csd.generate(model, [5, 6, 7], history=history, **options)
    fresh = csd.Engine(model).generate([5, 6, 7], **options)
    os._exit(0 if out.tokens == want == fresh.tokens else 3)
_, status = os.waitpid(child, 0)
if {own}:
    stream.close()
    assert csd.generate(model, [5, 6, 7], **options).tokens == want
else:
    other.join()
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "own, threads",
    [
        pytest.param(False, "2", id="another thread's call", marks=slow),
        pytest.param(True, "1", id="its own stream", marks=slow),
    ],
)
def test_a_forked_child_draws(own, threads):
    program = PROGRAM.format(tests=str(TESTS), own=own)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
