"""A line on the terminal that shows how far a call is."""

import sys
import time
from typing import TextIO

from csd.job import Job


class Progress:
    """Tokens so far, tokens per second and step, samples finished."""

    def __init__(self, jobs: list[Job], shown: bool, out: TextIO | None = None):
        self.shown = shown
        self._jobs = jobs
        self._out = out or sys.stderr
        self._total = sum(len(j.samples) for j in jobs)
        self._done = 0
        self._start = time.perf_counter()
        self._last = 0.0

    def tokens(self) -> None:
        now = time.perf_counter()
        if self.shown and now - self._last > 0.1:
            self._last = now
            self._write()

    def finished(self) -> None:
        self._done += 1
        if self.shown:
            self._write()

    def close(self) -> None:
        if self.shown:
            self._write()
            self._out.write("\n")

    def _write(self) -> None:
        tokens = sum(j.stats.tokens for j in self._jobs)
        steps = sum(j.stats.sample_steps for j in self._jobs)
        seconds = time.perf_counter() - self._start
        line = (
            f"{self._done}/{self._total} samples  {tokens} tokens  "
            f"{tokens / max(seconds, 1e-9):.0f} tokens/s  "
            f"{tokens / max(steps, 1):.2f} tokens/step"
        )
        self._out.write("\r" + line + " ")
        self._out.flush()
