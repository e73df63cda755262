"""A table of timed steps, read from a file or measured at an engine's start."""

import bisect
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypedDict

from csd.schema.check import AtLeast, Between
from csd.schema.read import read_file


class StepTimesFile(TypedDict):
    """Content of a file of step times."""

    rows: Annotated[list[Annotated[int, Between(1, 2**31 - 1)]], AtLeast(2)]
    seconds: Annotated[list[Annotated[float, Between(0, 1e9)]], AtLeast(2)]


class StepTimeTable:
    """Seconds of a step by its number of rows, linear between the timed sizes and beyond them.

    sizes: numbers of rows, ascending; seconds: of a step at each size, positive. Times never fall
    with the rows: disturbances only add to a timing, so a larger size bounds the smaller ones.
    """

    def __init__(self, sizes: list[int], seconds: list[float], steady: bool = True):
        """steady: whether no disturbance affected the timings."""
        if len(sizes) != len(seconds) or len(sizes) < 2:
            raise ValueError(
                f"seconds must be one per size, at least 2, got {len(seconds)} for {len(sizes)}"
            )
        if any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes must be ascending, got {sizes}")
        if min(seconds) <= 0:
            raise ValueError("seconds must be more than 0")
        self.sizes, self.steady = sizes, steady
        self.seconds = [min(seconds[i:]) for i in range(len(seconds))]

    def __call__(self, rows: int) -> float:
        return max(interpolate(self.sizes, self.seconds, rows), self.seconds[0])

    @classmethod
    def read(cls, path: str | Path) -> "StepTimeTable":
        """Read a JSON object with `rows` and `seconds`, as `python -m bench step_times` writes it.

        Raises ValueError, naming the file, for anything else.
        """
        try:
            found = read_file(path, StepTimesFile)
            return cls(found["rows"], found["seconds"])
        except ValueError as error:
            raise ValueError(f"{path} is not a file of step times: {error}") from error


def interpolate(xs: list[int], ys: list[float], x: int) -> float:
    """Interpolate the points (xs, ys) linearly; extrapolate along the first or last pair."""
    i = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    (a, b), (ya, yb) = xs[i - 1 : i + 1], ys[i - 1 : i + 1]
    return ya + (yb - ya) * (x - a) / (b - a)
