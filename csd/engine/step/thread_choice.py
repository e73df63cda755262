"""Number of threads of a CPU's steps, by their measured times: all, or one while others compete.

A step has hundreds of places at which its threads wait for one another. If another process uses a
core, each such place may wait until the operating system runs the delayed thread, for milliseconds.
Then one thread, which waits for nobody, is many times faster than two.

- Suspect. Threads that are never interrupted use `threads` seconds of CPU time per second. Less
  than `BUSY` of that, over `RECENT` steps, means that another process uses a core.
- Try. A few steps then run with one thread, and the faster number of threads is used further on.
- Try again. While one thread runs, a few steps with all threads find out whether the others have
  ended. A trial that cost x seconds more than the other number would have is followed by 1 / SHARE
  times x seconds without a trial, so trials take at most `SHARE` of the time.

Only the time of a step depends on the threads: csd's loops compute the same bits with any number of
them. PyTorch's products promise that less, so an engine that is `exact` by PyTorch's products keeps
its threads (`ThreadChoice.fixed`).
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean

import torch

# share of the CPU time of undisturbed threads below which another process is suspected
BUSY = 0.85
# steps that are averaged, and steps of a trial after its first
RECENT, TRIAL = 8, 3
# largest share of the time that trials may take, and seconds between two trials at least
SHARE, PAUSE = 0.05, 1.0


class ThreadChoice:
    """Chooses the number of threads of each step; used by one call at a time.

    fixed: always use all threads.
    """

    def __init__(self, fixed: bool = False):
        self.fixed = fixed
        self.most = self.threads = torch.get_num_threads()
        # per recent step with `threads`: its seconds, in those of the same step by the table of
        # step times, and its CPU seconds per second and thread
        self._took: deque[float] = deque(maxlen=RECENT)
        self._used: deque[float] = deque(maxlen=RECENT)
        self._tried: list[float] = []  # `_took` of the steps of a trial that is running
        self._trial: int | None = None  # the number of threads that it tries
        self._next = 0.0  # time before which no trial begins

    def begin(self) -> None:
        """Begin a call: the caller may have changed PyTorch's number of threads."""
        if torch.get_num_threads() != self.most:
            self.__init__(self.fixed)  # type: ignore[misc]

    @contextmanager
    def step(self) -> Iterator["StepTimer"]:
        """Context of a step, which sets PyTorch's threads and times the step.

        The body sets `expected` of the context's value.
        """
        timer = StepTimer()
        if self.fixed or self.most == 1:
            yield timer
            return
        threads = self._trial or self.threads
        torch.set_num_threads(threads)
        try:
            start, used = time.perf_counter(), time.process_time()
            yield timer
            now = time.perf_counter()
            share = (time.process_time() - used) / max(now - start, 1e-9) / threads
            self.learn((now - start) / timer.expected, share, now)
        finally:
            torch.set_num_threads(self.most)

    def learn(self, took: float, used: float, now: float) -> None:
        """Update from a step.

        took: its seconds, divided by those that the table expects. used: its CPU seconds per second
        and thread. now: the time at which it ended, in seconds.
        """
        if self._trial is not None:
            self._tried.append(took)
            if len(self._tried) > TRIAL or (len(self._tried) > 1 and took > 2 * mean(self._took)):
                self._end_trial(now)
            return
        self._took.append(took)
        self._used.append(used)
        if now < self._next or len(self._took) < RECENT:
            return
        if self.threads == 1 or mean(self._used) < BUSY:
            self._trial = 1 if self.threads > 1 else self.most

    def _end_trial(self, now: float) -> None:
        """Use the faster number of threads, and set the time of the next trial."""
        # the first step of a trial may wait for threads that sleep
        found, before = mean(self._tried[1:]), mean(self._took)
        lost = sum(self._tried) - len(self._tried) * min(found, before)
        if found < before:
            assert self._trial is not None
            self.threads = self._trial
            self._took.clear()
            self._used.clear()
        self._next = now + max(PAUSE, lost / SHARE)
        self._trial, self._tried = None, []


@dataclass
class StepTimer:
    """Report of a step; expected: its seconds by the table of step times, or 1 without one."""

    expected: float = 1.0
