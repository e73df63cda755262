"""Step times, estimated from the steps of a call and relative to a step without drafts."""

import math

from csd.engine.budget.table import StepTimeTable, interpolate

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
        found = seconds / self._table(rows) / self._level
        side = _side(found) if self._seen else 0
        if side and side == self._side:
            self._seen = side = 0
        self._side = side
        self._seen = min(self._seen + 1, RECENT)
        self._level *= 1 + ((found if self._seen == 1 else _clip(found)) - 1) / self._seen
        return side != 0

    def learn_drafted(self, base: int, rows: int, seconds: float) -> bool:
        """Update from a step with drafts; returns True if its time was an outlier."""
        expected = self.ratio(base, rows)
        found = seconds / self.plain(base) / expected
        excess = _clip(found) * expected - self._table(rows) / self._table(base)
        for i, size in enumerate(self._table.sizes):
            # weight 1/8 for each factor of 2 between the numbers of rows
            near = 2.0 ** (-3 * abs(math.log2(size / rows)))
            here = excess * (size / rows if excess < 0 else min(size / rows, 1.0))
            self._weight[i] = min(self._weight[i] + near, RECENT)
            self._excess[i] += near / self._weight[i] * (here - self._excess[i])
        return _side(found) != 0


def _side(found: float) -> int:
    return (found > OUTLIER) - (found < 1 / OUTLIER)


def _clip(found: float) -> float:
    return min(max(found, 1 / OUTLIER), OUTLIER)
