"""What a step costs by its rows: as timed at the first automatic call, and as steps take lately."""

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypedDict

from csd.schema.check import AtLeast, Between
from csd.schema.read import read_file


class StepTimes(TypedDict):
    """A file of step times."""

    rows: Annotated[list[Annotated[int, Between(1, 2**31 - 1)]], AtLeast(2)]
    seconds: Annotated[list[Annotated[float, Between(0, 1e9)]], AtLeast(2)]


# a step that takes so many times what was expected, or so much less, is a surprise
SURPRISE = 1.4
# steps with drafts that are looked back at; once as many are known, what steps take is estimated
# again after a few only, because that takes a hundredth of a small model's step
LAST, AGAIN = 24, 8
# drafted tokens that recorded samples, where all that were expected were accepted, count as
EXPECTED = 6.0


class CostModel:
    """Seconds of a step by its rows, linear between the measured sizes and beyond them."""

    def __init__(self, sizes: list[int], seconds: list[float]):
        if len(sizes) != len(seconds) or len(sizes) < 2:
            raise ValueError(
                f"seconds must be one per size, at least 2, got {len(seconds)} for {len(sizes)}"
            )
        if any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes must rise, got {sizes}")
        if min(seconds) <= 0:
            raise ValueError("seconds must be more than 0")
        self.sizes = sizes
        self.steady = True  # whether the machine disturbed no measurement of it
        # more rows never cost less, and what disturbs a measurement only adds to it
        self.seconds = [min(seconds[i:]) for i in range(len(seconds))]

    def __call__(self, rows: int) -> float:
        i = min(max(bisect.bisect_left(self.sizes, rows), 1), len(self.sizes) - 1)
        (a, b), (ta, tb) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return max(ta + (tb - ta) * (rows - a) / (b - a), self.seconds[0])

    @cached_property
    def late(self) -> "LateSteps":
        """What steps took of late, in all calls that share this table."""
        return LateSteps(self)

    @classmethod
    def read(cls, path: str | Path) -> "CostModel":
        """From a JSON object with `rows` and `seconds`, as `python -m bench step_times` writes it.

        Raises ValueError, naming the file, for anything else.
        """
        try:
            found = read_file(path, StepTimes)
            return cls(found["rows"], found["seconds"])
        except ValueError as error:
            raise ValueError(f"{path} is not a file of step times: {error}") from error

    @classmethod
    def measure(
        cls, run: Callable[[int], None], sizes: list[int], repeats: int = 3, worth: float = math.inf
    ) -> "CostModel":
        """Times `run(rows)` for every size, the sizes in turn, and keeps the least: the time that a
        busy machine adds does not depend on the size.

        worth: sizes beyond the first that takes so many times what the smallest does are left out.
        """
        times: dict[int, list[float]] = {size: [] for size in sizes}

        def again(size: int) -> None:
            start = time.perf_counter()
            run(size)
            times[size].append(time.perf_counter() - start)

        def too_long(size: int) -> bool:
            return len(times) > 2 and min(times[size]) > worth * min(times[sizes[0]])

        for size in (sizes[0], sizes[1]):
            run(size)
        for _ in range(repeats):
            for size in [*times]:
                again(size)
                if too_long(size):
                    # once more, for something else may have taken the time
                    again(size)
                if too_long(size):
                    times = {m: found for m, found in times.items() if m <= max(size, sizes[1])}
                    break
        table = cls([*times], [min(found) for found in times.values()])
        twice = [sorted(found)[:2] for found in times.values()]
        table.steady = not any(_differ(found[-1], found[0]) for found in twice)
        return table


class Calibration:
    """Accepted drafted tokens for each one that was expected, of about the last 100 of these."""

    def __init__(self, last: "Calibration | None" = None):
        """last: that of the last call, which counts as much as what recorded samples showed."""
        self._expected = self._accepted = EXPECTED
        if last is not None:
            kept = min(last._expected, EXPECTED)
            self._expected += kept
            self._accepted += kept * float(last)

    def __float__(self) -> float:
        return self._accepted / self._expected

    def learn(self, expected: float, accepted: float) -> None:
        fade = 1 - min(expected, 50.0) / 100
        self._expected = self._expected * fade + expected
        self._accepted = self._accepted * fade + accepted


class LateSteps:
    """Corrects a table by what steps took of late.

    The unit is a step without drafts, so a load that slows every step changes no ratio. Everything
    is a weighted mean of what is near the median: one slow step changes nothing, and steps that are
    often a little slower, as those of many rows are, count as they are.
    """

    def __init__(self, table: CostModel):
        self._table, self._step = table, 0
        self._calibration: Calibration | None = None
        self.credit = math.inf  # for drafts, that the last call left (csd/engine/turns.py)
        # (step, seconds for each of the table's) of steps without drafts
        self._plain: deque[tuple[int, float]] = deque(maxlen=9)
        self._doubt: tuple[int, float] | None = None  # of them, a surprise that may be an accident
        # of steps with drafts: (step, rows, nodes, level, what the table had it take and what it
        # took, in plain steps)
        self._drafted: deque[tuple[int, int, int, float, float, float]] = deque(maxlen=LAST)
        self._level = 1.0
        self._curves: dict[tuple[int, int], CostModel] = {}  # by their first and last rows

    def calibrate(self) -> Calibration:
        """Begin a call: its calibration starts halfway between the last call's and 1."""
        self._calibration = Calibration(self._calibration)
        return self._calibration

    @property
    def known(self) -> bool:
        """Whether a few steps of both kinds have been seen."""
        return min(len(self._plain), len(self._drafted)) >= 3

    @property
    def drafted_age(self) -> float:
        """Steps since the last one with drafts; infinite before the third."""
        return self._step - self._drafted[-1][0] if len(self._drafted) >= 3 else math.inf

    def plain(self, rows: int) -> float:
        """Seconds of a step without drafts."""
        return self._table(rows) * self._level

    def ratio(self, base: int, rows: int) -> float:
        """A step over `rows` rows with drafts, in steps over `base` rows without."""
        if not self._drafted:
            return _in_plain_steps(self._table(base), self._table(rows), self._level)
        nodes, last = max(rows - base, 1), len(self._drafted) - 1
        plain, whole = self._table(base), self._table(rows)
        found = []
        for i, (_, m, drafted, level, predicted_then, took) in enumerate(self._drafted):
            predicted = _in_plain_steps(plain, whole, level)
            if took < predicted_then and predicted_then > 1:
                ratio = 1 + (predicted - 1) * max(took - 1, 0.0) / (predicted_then - 1)
            else:
                # in proportion up to the nodes that were seen, constant beyond: where nothing is
                # known the lower value is taken, because only what is tried is measured
                ratio = predicted + (took - predicted_then) * min(nodes / drafted, 1.0)
            near = abs(math.log2(rows / m))
            found.append((max(ratio, 1.0), 2 ** ((i - last) / 6 - 8 * near)))
        return _usual(found)

    def curve(self, base: int, most: int) -> "CostModel":
        """`ratio` as it was a few steps ago, at the table's sizes and at those of late, linear
        between them; fewer rows never cost more."""
        known, most = self._table.sizes, max(most, base + 1)
        most = next((m for m in known if m >= most), most)
        if (base, most) not in self._curves:
            late = (rows for _, rows, *_ in self._drafted)
            inside = {m for m in (*known, *late) if base < m < most}
            sizes = [base, *sorted(inside), most]
            ratios = [self.ratio(base, m) for m in sizes]
            ratios = [min(ratios[i:]) for i in range(len(ratios))]
            self._curves[base, most] = CostModel(sizes, ratios)
        return self._curves[base, most]

    def learn_plain(self, rows: int, seconds: float) -> bool:
        """From a step without drafts; returns whether it was a surprise."""
        self._count()
        found, doubt = seconds / self._table(rows), self._doubt
        surprise = _differ(found, self._level)
        if surprise and doubt and (found > self._level) == (doubt[1] > self._level):
            # a second one in a row: the load has changed, and the steps with drafts since the last
            # expected one were compared with a level that was gone
            last = self._plain[-1][0] if self._plain else 0
            while self._drafted and self._drafted[-1][0] > last:
                self._drafted.pop()
            self._curves.clear()
            self._plain.clear()
            surprise = False
        if doubt:
            self._plain.append(doubt)
            self._doubt = None
        if surprise and self._plain:
            self._doubt = self._step, found
            return True
        self._plain.append((self._step, found))
        self._level = _usual((x, 2 ** ((at - self._step) / 64)) for at, x in self._plain)
        return False

    def learn_drafted(self, base: int, rows: int, seconds: float) -> bool:
        """From a step with drafts; returns whether it was a surprise."""
        self._count()
        took = seconds / self.plain(base)
        surprise = _differ(took, self.curve(base, rows)(rows))
        nodes, level = max(rows - base, 1), self._level
        predicted = _in_plain_steps(self._table(base), self._table(rows), level)
        self._drafted.append((self._step, rows, nodes, level, predicted, took))
        return surprise

    def learn_nothing(self) -> None:
        """From a step of neither kind."""
        self._count()

    def _count(self) -> None:
        self._step += 1
        if len(self._drafted) < LAST or self._step % AGAIN == 0:
            self._curves.clear()


def _in_plain_steps(plain: float, seconds: float, level: float) -> float:
    """A step that takes `seconds` by the table, in steps that take `plain`.

    What plain steps take beyond the table is not taken again for more rows.
    """
    over = plain * max(level - 1, 0.0)
    return (seconds + over) / (plain + over)


def _differ(found: float, expected: float) -> bool:
    return not 1 / SURPRISE < found / expected < SURPRISE


def _usual(weighted: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight) pairs the mean of those that are no surprise beside the lower median."""
    pairs = sorted(weighted)
    median, half = pairs[-1][0], sum(weight for _, weight in pairs) / 2
    for value, weight in pairs:
        half -= weight
        if half <= 0:
            median = value
            break
    near = [(value, weight) for value, weight in pairs if not _differ(value, median)]
    return sum(value * weight for value, weight in near) / sum(weight for _, weight in near)
