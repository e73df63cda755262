"""Number of threads of a CPU's steps, by their measured times: all, or one while others compete.

A step has hundreds of places at which its threads wait for one another. If another process uses a
core, each such place may wait until the operating system runs the delayed thread, for milliseconds.
Then one thread, which waits for nobody, is many times faster than two.

- Try. After `RECENT` steps, a few steps run with the other number of threads, and the faster one is
  used further on. CPU time does not show whether another process is in the way: threads that wait
  for one another use it too, and so do the threads of a second library.
- Try at once when two steps in a row take much longer than before: another process has begun.
- Try again, since other processes begin and end. A trial that cost x seconds more than the better
  number would have is followed by x / `SHARE` seconds without a trial, so trials take at most about
  that share of the time.

Only the time of a step depends on the threads: csd's loops compute the same bits with any number of
them. PyTorch's products are compared, and an exact engine keeps its threads (`fixed`) if bits
differ.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

import torch

# steps that are averaged, and steps of a trial after its first
RECENT, TRIAL = 4, 2
# a step that takes so many times as long as the shortest recent one is slow
SLOW = 2
# largest share of the time that trials may take, and seconds between two trials at least
SHARE, PAUSE = 0.02, 1.0


class ThreadChoice:
    """Chooses the number of threads of each step; used by one call at a time.

    fixed: always use all threads.
    """

    def __init__(self, fixed: bool = False):
        self.fixed, self.expected = fixed, 1.0
        self._start_over()

    def _start_over(self) -> None:
        self.max_threads = self.threads = torch.get_num_threads()
        # per recent step with `threads`: its seconds, in those of the same step by the table of
        # step times
        self._took: deque[float] = deque(maxlen=RECENT)
        self._slow = 0  # slow steps in a row
        self._tried: list[float] = []  # `_took` of the steps of a trial that is running
        self._spent = 0.0  # seconds of these steps
        self._trial: int | None = None  # the number of threads that it tries
        self._next = 0.0  # time before which no trial begins

    def begin(self) -> None:
        """Begin a call: the caller may have changed PyTorch's number of threads."""
        if torch.get_num_threads() != self.max_threads:
            self._start_over()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step, which sets PyTorch's threads and times the step.

        The body sets `expected`: the step's seconds by the table of step times, or 1 without one.
        """
        if self.fixed or self.max_threads == 1:
            yield
            return
        torch.set_num_threads(self._trial or self.threads)
        try:
            start = time.perf_counter()
            yield
            now = time.perf_counter()
            self.learn((now - start) / self.expected, now - start, now)
        finally:
            torch.set_num_threads(self.max_threads)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Context of work between steps, such as the reading of prompts, with the chosen number."""
        if self.fixed or self.threads == self.max_threads:
            yield
            return
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.max_threads)

    def learn(self, took: float, seconds: float, now: float) -> None:
        """Update from a step of so many seconds.

        took: the seconds, divided by those that the table expects. now: the time of its end.
        """
        if self._trial is not None:
            self._tried.append(took)
            self._spent += seconds
            # the first step may wait for threads that sleep, but not for so long
            longest = (2 if len(self._tried) > 1 else 4) * mean(self._took)
            if len(self._tried) > TRIAL or took > longest:
                self._end_trial(now)
            return
        slow = bool(self._took) and took > SLOW * min(self._took)
        self._slow = self._slow + 1 if slow else 0
        self._took.append(took)
        begun = self.threads > 1 and self._slow > 1
        if begun or (now >= self._next and len(self._took) == RECENT):
            self._trial = 1 if self.threads > 1 else self.max_threads

    def _end_trial(self, now: float) -> None:
        """Use the faster number of threads, and set the time of the next trial."""
        # the first step of a trial may wait for threads that sleep
        tried, before = mean(self._tried[1:] or self._tried), mean(self._took)
        lost = self._spent * (1 - len(self._tried) * min(tried, before) / sum(self._tried))
        if tried < before:
            assert self._trial is not None
            self.threads = self._trial
            self._took.clear()
        self._next = now + max(PAUSE, lost / SHARE)
        self._trial, self._tried, self._spent, self._slow = None, [], 0.0, 0
