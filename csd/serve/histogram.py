"""Counts of durations by upper bounds, as Prometheus has them."""

from bisect import bisect_left
from collections.abc import Iterator

# seconds: a step of a small model, to a queue's minutes
BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)


class Histogram:
    """Durations in seconds. One thread adds, and any may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        # a bound belongs to its bucket
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each upper bound, "+Inf" at last, with the number of durations up to it."""
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield bound, total
