"""Step times as the steps of a call show them, relative to a step without drafts."""

import math

from csd.engine.budget.table import StepTimeTable, interpolate

# an observation so many times above or below its estimate is an outlier
OUTLIER = 1.4
# observations that an estimate averages
RECENT = 8


class StepTimeEstimator:
    """Corrects a table of timed steps by the steps of a call.

    level * table(m) is the time of a step without drafts over m rows, and
    ratio(base, m) = table(m) / table(base) + excess(m) that of one with drafts over m rows, in
    steps without drafts over `base`: a load that slows every step leaves it unchanged. Both
    estimates are running means of the last `RECENT` observations, in which an outlier counts as
    `OUTLIER` times the estimate, so one slow step moves them little. Only what is tried is
    measured, so more rows than those that ran get a low estimate: a negative excess grows with the
    rows, a positive one does not. Two outliers in a row in the
    same direction among steps without drafts are another load, where the level begins again.
    """

    def __init__(self, table: StepTimeTable):
        self._table = table
        self._level, self._seen = 1.0, 0  # the estimate and the observations in it
        self._side = 0  # of the last step without drafts: 1 or -1 for an outlier above or below
        # of each size: the estimate and the observations in it, weighted by nearness
        self._excess = [0.0] * len(table.sizes)
        self._weight = [0.0] * len(table.sizes)

    def plain(self, rows: int) -> float:
        """Seconds of a step without drafts."""
        return self._level * self._table(rows)

    def ratio(self, base: int, rows: int) -> float:
        """Time of a step with drafts over `rows`, in steps without drafts over `base` rows."""
        sizes = self._table.sizes
        excess = interpolate(sizes, self._excess, min(max(rows, sizes[0]), sizes[-1]))
        return max(self._table(rows) / self._table(base) + excess, 1.0)

    def learn_plain(self, rows: int, seconds: float) -> bool:
        """Update from a step without drafts; returns whether it was an outlier."""
        found = seconds / self._table(rows) / self._level
        side = _side(found) if self._seen else 0
        if side and side == self._side:
            self._seen = side = 0
        self._side = side
        self._seen = min(self._seen + 1, RECENT)
        self._level *= 1 + ((found if self._seen == 1 else _clip(found)) - 1) / self._seen
        return side != 0

    def learn_drafted(self, base: int, rows: int, seconds: float) -> bool:
        """Update from a step with drafts; returns whether it was an outlier."""
        expected = self.ratio(base, rows)
        found = seconds / self.plain(base) / expected
        excess = _clip(found) * expected - self._table(rows) / self._table(base)
        for i, size in enumerate(self._table.sizes):
            # an eighth for each factor of 2 between the rows
            near = 2.0 ** (-3 * abs(math.log2(size / rows)))
            here = excess * (size / rows if excess < 0 else min(size / rows, 1.0))
            self._weight[i] = min(self._weight[i] + near, RECENT)
            self._excess[i] += near / self._weight[i] * (here - self._excess[i])
        return _side(found) != 0


def _side(found: float) -> int:
    return (found > OUTLIER) - (found < 1 / OUTLIER)


def _clip(found: float) -> float:
    return min(max(found, 1 / OUTLIER), OUTLIER)
