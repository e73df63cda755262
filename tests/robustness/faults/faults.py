"""Small calls for faults to end, checks of an engine after one, and how many are tried."""

import linecache
import os
import random
import signal
import sys
import threading
import time

from helpers.models.scripted import Letters, PrefixSum, engine
from tqdm import tqdm

import csd

MANY = bool(os.environ.get("CSD_FAULTS"))
# of the calls of `fresh` engines
PROMPTS = ["abcabc", "hello"]
OPTIONS = dict(num_samples=3, max_new_tokens=8, seed=4, budget=8, stop_token_ids=[3])


def fresh(**options):
    return engine(PrefixSum(sharpness=8.0), Letters(), max_slots=2, prefill_chunk=4, **options)


def times(few: int, many: int) -> range:
    """Numbers of the attempts: `many` of them in `make test-faults`."""
    return range(many if MANY else few)


def assert_usable(engine, prompt, expected, **options) -> None:
    """Nothing of the call before is left: no page, no slot, no group, no lock."""
    step = engine.caches.step
    if step is not None and engine._ended:
        assert len(step.cache.allocator) == step.cache.k.shape[1]
        assert not step.slots.live.any()
        assert (step.slots.group_key == -1).all()
    assert not engine.turn.lock.locked()
    assert csd.generate(engine, prompt, **options).tokens == expected


class Never:
    """A callback under which no step may run."""

    def __call__(self, *args):
        raise AssertionError("a step has run")


class Interrupted:
    """Raises `error` at the `at`-th line of csd that runs within the block; counts them all.

    at: from 0; with fewer lines none is hit, and `hit` is empty. Python handles no signal
    between the last call in a `with` block and its `__exit__` (bpo-29988), so the line event that a
    tracer gets there does not count. Nor does that of a `try:`, an instruction that no handler of
    the blocks around it covers, and at which Python handles no signal either.
    """

    def __init__(self, at: int, error=KeyboardInterrupt, folder="/csd/engine/"):
        self.at, self.error, self.folder = at, error, folder
        self.lines, self.hit = 0, ""
        self._entered: set[tuple[int, int]] = set()  # the with blocks that run: frame, line

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._before)

    def _call(self, frame, event, arg):
        return self._line if self.folder in frame.f_code.co_filename else None

    def _line(self, frame, event, arg):
        if event == "line" and not self._leaves(frame) and not _tries(frame):
            self.lines += 1
            if self.lines == self.at + 1:
                self.hit = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self.error
        return self._line

    def _leaves(self, frame) -> bool:
        """True if the event is that of leaving a with block: the second one at its first line."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not line.lstrip().startswith("with "):
            return False
        place = id(frame), frame.f_lineno
        self._entered ^= {place}
        return place not in self._entered


def _tries(frame) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "try:"


def killed(work, after: float) -> bool:
    """Runs `work` in a child that is killed after so many seconds; False where it ended first."""
    child = os.fork()
    if child == 0:
        try:
            # its output is of no use to the parent's test
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            # tqdm's own is shared with the parent, which would wait for ever if a kill left it held
            tqdm.set_lock(threading.RLock())
            work()
        finally:
            os._exit(0)
    end = time.monotonic() + after
    while time.monotonic() < end:
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            return False
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def moment(rng: random.Random, longest: float) -> float:
    """Seconds, as often short as long."""
    return longest * rng.random() ** 2
