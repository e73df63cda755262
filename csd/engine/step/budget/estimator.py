"""Step times: a table of timed steps, and its correction by the steps of a call.

A table is read from a file, or measured at an engine's start. Estimates are relative to a step
without drafts.
"""

import bisect
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypedDict

from csd.utils.check import AtLeast, Between
from csd.utils.files import read_file


class StepTimesFile(TypedDict):
    """Content of a file of step times."""

    rows: Annotated[list[Annotated[int, Between(1, 2**31 - 1)]], AtLeast(2)]
    seconds: Annotated[list[Annotated[float, Between(0, 1e9)]], AtLeast(2)]


# measurements of a machine that is always busy, after which a table is used as it is: its smallest
# times are of undisturbed steps or of the usual load, whose level an estimator follows
MEASUREMENTS = 4


class StepTimeTable:
    """Seconds of a step by its number of rows, linear between the timed sizes and beyond them.

    sizes: numbers of rows, ascending; seconds: of a step at each size, positive. Times never fall
    with the rows: disturbances only add to a timing, so a larger size bounds the smaller ones.
    steady: whether no disturbance affected the timings; measurements: number of measurements of
    whose times each size has the smallest.
    """

    def __init__(
        self, sizes: list[int], seconds: list[float], steady: bool = True, measurements: int = 1
    ):
        if len(sizes) != len(seconds) or len(sizes) < 2:
            raise ValueError(
                f"seconds must be one per size, at least 2, got {len(seconds)} for {len(sizes)}"
            )
        if any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes must be ascending, got {sizes}")
        if min(seconds) <= 0:
            raise ValueError("seconds must be more than 0")
        self.sizes, self.steady, self.measurements = sizes, steady, measurements
        self.seconds = [min(seconds[i:]) for i in range(len(seconds))]

    @property
    def settled(self) -> bool:
        """True if a further measurement is not worth its time."""
        return self.steady or self.measurements >= MEASUREMENTS

    def __call__(self, rows: int) -> float:
        return max(interpolate(self.sizes, self.seconds, rows), self.seconds[0])

    @classmethod
    def read(cls, path: str | Path) -> "StepTimeTable":
        """Read a JSON object with `rows` and `seconds`, as `python -m bench step_times` writes it.

        Raises ValueError, naming the file, for anything else.
        """
        try:
            fields = read_file(path, StepTimesFile)
            return cls(fields["rows"], fields["seconds"])
        except ValueError as error:
            raise ValueError(f"{path} is not a file of step times: {error}") from error


def interpolate(xs: list[int], ys: list[float], x: int) -> float:
    """Interpolate the points (xs, ys) linearly; extrapolate along the first or last pair."""
    i = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    (a, b), (ya, yb) = xs[i - 1 : i + 1], ys[i - 1 : i + 1]
    return ya + (yb - ya) * (x - a) / (b - a)


# an observation is an outlier if it differs from its estimate by more than this factor
OUTLIER = 1.4
# number of observations that an estimate averages
RECENT = 8


class StepTimeEstimator:
    """Corrects a table of timed steps by the steps of a call.

    A step without drafts over m rows takes level * table(m) seconds. A step with drafts over m rows
    takes ratio(base, m) = table(m) / table(base) + excess(m) times as long as a step without drafts
    over `base` rows; a load that slows every step does not change this ratio. Level and excess are
    running means of the last `RECENT` observations, in which an outlier counts as `OUTLIER` times
    the estimate (or 1 / `OUTLIER`), so one slow step changes them little. Only sizes that are tried
    are measured, so sizes above those that ran get a low estimate: a negative excess grows with the
    rows, a positive one does not. Two consecutive outliers in the same direction among steps
    without drafts indicate a changed load, and the level restarts from the second one.
    """

    def __init__(self, table: StepTimeTable):
        self._table = table
        self._level, self._seen = 1.0, 0  # the estimate and its number of observations
        self._side = 0  # last step without drafts: 1 or -1 for an outlier above or below, else 0
        # for each size: the estimate and its number of observations, weighted by nearness
        self._excess = [0.0] * len(table.sizes)
        self._weight = [0.0] * len(table.sizes)

    def plain(self, rows: int) -> float:
        """Estimated seconds of a step without drafts over `rows` rows."""
        return self._level * self._table(rows)

    def ratio(self, base: int, rows: int) -> float:
        """Time of a step with drafts, in steps without drafts over `base` rows; at least 1."""
        sizes = self._table.sizes
        excess = interpolate(sizes, self._excess, min(max(rows, sizes[0]), sizes[-1]))
        return max(self._table(rows) / self._table(base) + excess, 1.0)

    def learn_plain(self, rows: int, seconds: float) -> bool:
        """Update from a step without drafts; returns True if its time was an outlier."""
        ratio = seconds / self._table(rows) / self._level
        side = _side(ratio) if self._seen else 0
        if side and side == self._side:
            self._seen = side = 0
        self._side = side
        self._seen = min(self._seen + 1, RECENT)
        self._level *= 1 + ((ratio if self._seen == 1 else _clip(ratio)) - 1) / self._seen
        return side != 0

    def learn_drafted(self, base: int, rows: int, seconds: float) -> bool:
        """Update from a step with drafts; returns True if its time was an outlier."""
        expected = self.ratio(base, rows)
        ratio = seconds / self.plain(base) / expected
        excess = _clip(ratio) * expected - self._table(rows) / self._table(base)
        for i, size in enumerate(self._table.sizes):
            # weight 1/8 for each factor of 2 between the numbers of rows
            near = 2.0 ** (-3 * abs(math.log2(size / rows)))
            here = excess * (size / rows if excess < 0 else min(size / rows, 1.0))
            self._weight[i] = min(self._weight[i] + near, RECENT)
            self._excess[i] += near / self._weight[i] * (here - self._excess[i])
        return _side(ratio) != 0


def _side(ratio: float) -> int:
    return (ratio > OUTLIER) - (ratio < 1 / OUTLIER)


def _clip(ratio: float) -> float:
    return min(max(ratio, 1 / OUTLIER), OUTLIER)
