"""The automatic budgets: the number of drafted tokens with the highest expected token rate.

A gate decides which steps may draft, and the gain of a call is summed up for its statistics.
"""

from collections import deque
from dataclasses import dataclass

from csd.engine.results.record import Record
from csd.engine.step.budget.estimator import RECENT, StepTimeEstimator, StepTimeTable
from csd.engine.step.budget.fixed import PER_SLOT, Budget, FixedPool, Penalties, most_nodes
from csd.state.pool import acceptance, path_probability

# share of the time spent on probes and on measuring steps without drafts
EXPLORE = 0.01
# loss after which a call's drafts pause, in steps without drafts; gains raise the limit up to 4
# times as high
CREDIT = 1.0
# length of the longest cool-down, in steps
COOLDOWN = 16


class SpeculationGate:
    """Lets steps draft while a credit lasts, and schedules steps without drafts for measurement.

    A step with drafts adds the tokens that it committed per slot to the credit and subtracts its
    time, in steps without drafts. After n consecutive steps whose drafts do not pay, the next step
    with drafts, a probe, follows 2^n steps later.
    """

    def __init__(self) -> None:
        self._credit = CREDIT
        self._gain = 1.0  # tokens per second of drafted steps, relative to steps without drafts
        self._since = 0  # steps since the last one without drafts
        self._measured = 0  # number of steps without drafts
        self._outliers = 0  # consecutive ones
        self._failures = self._cooldown = 0
        self.probe = False  # whether the step drafts even if no gain is expected

    def should_draft(self) -> bool:
        """True if the next step may draft; called once per step."""
        self._credit = min(self._credit + EXPLORE, max(self._credit, CREDIT))
        self._since += 1
        if self._cooldown or self._credit <= 0 or self._should_measure():
            self._cooldown = max(self._cooldown - 1, 0)
            self._since, self.probe = 0, False
            return False
        self.probe = 2**self._failures >= COOLDOWN
        return True

    def _should_measure(self) -> bool:
        """True if a step without drafts is due: after 2 outliers, or as often as `EXPLORE` allows.

        Such a step commits only 1 / gain of the tokens that drafted steps commit in its time.
        """
        if self._since < 2:
            return False
        every = max(COOLDOWN, (1 - 1 / max(self._gain, 1.0)) / EXPLORE)
        return self._measured < 3 or self._outliers >= 2 or self._since > every

    def measured(self, outlier: bool) -> None:
        """Update from a step without drafts."""
        self._measured += 1
        # the outlier may be an accident: one more step without drafts decides
        self._outliers = 2 if outlier else 0

    def drafted(self, tokens: float, took: float, pays: bool, outlier: bool) -> None:
        """Update from a step with drafts.

        tokens: committed per slot; took: its time, in steps without drafts; pays: whether such a
        step is expected to win; outlier: whether its time was an outlier.
        """
        self._outliers = self._outliers + 1 if outlier else 0
        self._gain += (tokens / took - self._gain) / RECENT
        self.spend(took - tokens)
        if pays:
            self._failures = 0
        else:
            self.back_off()

    def spend(self, lost: float) -> None:
        """Subtract a loss, in steps without drafts, from the credit; a gain is a negative loss."""
        self._credit = min(self._credit - lost, 4 * CREDIT)

    def back_off(self) -> None:
        """Begin a cool-down, twice as long as the last consecutive one, at most `COOLDOWN`."""
        self._failures = min(self._failures + 1, COOLDOWN.bit_length() - 1)
        self._cooldown = 2**self._failures


# fewest steps from which a gain is computed
MIN_STEPS = 16


@dataclass(slots=True)
class Gain:
    """Gain of a call's drafts, as sums over its steps.

    A step without drafts commits one token per live slot. So a step over L live slots that commits
    n tokens replaces n / L steps without drafts, and the gain of a call is

        sum over its steps of (n / L) (seconds of a step without drafts over L rows)
        / sum over its steps of (seconds of the step, drafting included)

    A step that ran without drafts took its own seconds, less those of drafting. The seconds of the
    others are the estimates by which the budget was chosen (`estimator`).
    """

    steps: int = 0
    seconds: float = 0.0
    plain: float = 0.0  # seconds without drafts
    live: int = 0  # most live slots of a step

    def add(self, live_count: int, tokens: int, seconds: float, plain: float) -> None:
        """Add a step; plain: seconds of a step without drafts over as many slots."""
        self.steps += 1
        self.seconds += seconds
        self.plain += plain * tokens / live_count
        self.live = max(self.live, live_count)

    @property
    def ratio(self) -> float | None:
        """Seconds without drafts divided by seconds with them; None for too few steps."""
        return self.plain / self.seconds if self.steps >= MIN_STEPS and self.seconds else None


class Controller:
    """Step times, calibration and drafting gate of one call, for eager and static steps."""

    def __init__(self, table: StepTimeTable):
        self.times, self.gate, self.gain = StepTimeEstimator(table), SpeculationGate(), Gain()
        # numbers of drafted tokens, over about the last 100 expected ones; both start at RECENT
        self._expected = self._accepted = float(RECENT)
        self._asked: deque[bool] = deque()  # for each step not yet read: whether it might draft

    @property
    def calibration(self) -> float:
        """Ratio of accepted drafted tokens to expected ones."""
        return self._accepted / self._expected

    def should_draft(self) -> bool:
        """True if the next step may draft; called once per step."""
        self._asked.append(self.gate.should_draft())
        return self._asked[-1]

    def update(self, live_count: int, base: int, record: Record, shares: list[float]) -> None:
        """Update from a step's record.

        live_count: number of live slots; base: rows of a step without drafts; shares: weight of
            each slot's tokens.
        """
        asked = self._asked.popleft() if self._asked else bool(record.costs)
        seconds = record.draft_seconds + record.model_seconds
        if record.costs:
            fade = 1 - min(record.expected, 50.0) / 100
            self._expected = self._expected * fade + record.expected
            self._accepted = self._accepted * fade + record.accepted
        if not live_count or not seconds:
            return
        plain = self.times.plain(base) if record.costs else record.model_seconds
        self.gain.add(live_count, sum(record.count), seconds, plain)
        if record.costs:
            outlier = self.times.learn_drafted(base, record.rows, seconds)
            took = self.times.ratio(base, record.rows)
            tokens = sum(w * n for w, n in zip(shares, record.count, strict=True)) / sum(shares)
            pays = 1 + self.calibration * record.expected / live_count > took
            self.gate.drafted(tokens, took, pays, outlier)
        elif asked:
            self.gate.spend(record.draft_seconds / self.times.plain(base))
        else:
            self.gate.measured(self.times.learn_plain(record.rows, seconds))

    @property
    def double_cost(self) -> float | None:
        """Time of a step of twice the slots' rows, in steps without drafts; None without steps."""
        live = self.gain.live
        return self.times.ratio(live, 2 * live) if live else None


class AutoBudget(Budget):
    """Chooses the number of nodes with the most expected tokens per second; 0 if none pay."""

    def __init__(self, table: StepTimeTable):
        super().__init__(0)
        self.control = Controller(table)
        self._kept = PER_SLOT  # number of nodes that recent steps verified
        self._penalties: Penalties = None

    def num_draft_tokens(self, roots: int) -> int:
        if not self.control.should_draft():
            return 0
        return min(most_nodes(roots), 2 * max(roots, self._kept))

    def select(
        self,
        live_count: int,
        costs: list[int],
        penalties: Penalties = None,
        roots: int | None = None,
    ) -> int:
        control, self._penalties = self.control, penalties
        base = live_count if roots is None else roots
        calibration, best_rate = control.calibration, 1.0
        if control.gate.probe:
            # acceptance may also have changed since the last drafts
            calibration, best_rate = max(calibration, 1.0), 0.0
        weight = float(live_count) if penalties is None else sum(_shares(penalties))
        best, promised = 0, 0.0
        for k, cost in enumerate(sorted(costs), 1):
            promised += acceptance(cost) / weight
            rate = (1 + calibration * promised) / control.times.ratio(base, base + k)
            if rate > best_rate:
                best, best_rate = k, rate
        return best

    def record_selection(self, nodes: int) -> None:
        self._kept = max(nodes, self._kept // 2)
        if not nodes:
            self.control.gate.back_off()

    def update(self, live_count: int, record: Record) -> None:
        shares = [float(n > 0) for n in record.nodes]
        if self._penalties:
            shares = _shares(self._penalties)
        self.control.update(live_count, max(record.roots, 1), record, shares)


class AutoPool(FixedPool):
    """Chooses the pool size with the most expected tokens per second; drafts fill the pool.

    The expectation follows the last step that drafted: each live slot accepts as many nodes as in
    that step, and each node in excess of its drafts counts half as much as its last node.
    """

    def __init__(self, table: StepTimeTable, sizes: list[int]):
        super().__init__(0, sizes)
        self.control = Controller(table)
        self._worth: list[float] = []  # acceptance probabilities of that step's nodes, descending
        self._live = 1  # live slots of that step

    def expect(self, live_count: int, nodes: int) -> float:
        """Expected number of accepted nodes among `nodes` drafted ones."""
        if not self._worth:
            # before the first record: assume that drafts hit half of the slots' next tokens
            return min(nodes, live_count) / 2
        share = live_count / self._live
        known = nodes / share
        full = min(int(known), len(self._worth))
        beyond = (known - full) * self._worth[-1] / 2
        return (sum(self._worth[:full]) + beyond) * share * self.control.calibration

    def pool_shape(self, live_count: int) -> tuple[int, int]:
        sizes = [size for size in self.sizes if size >= live_count] or self.sizes[-1:]
        base, control = sizes[0], self.control
        if not control.should_draft():
            return base, 0

        def rate(m: int) -> float:
            gain = 1 + self.expect(live_count, m - live_count) / live_count
            return gain / control.times.ratio(base, m)

        best = max(sizes, key=rate)
        if rate(best) < 1 and not control.gate.probe:
            control.gate.back_off()
            return base, 0
        return best, best

    def update(self, live_count: int, record: Record) -> None:
        base = next((size for size in self.sizes if size >= live_count), self.sizes[-1])
        self.control.update(live_count, base, record, [float(n > 0) for n in record.nodes])
        if record.costs:
            self._worth = sorted(map(acceptance, record.costs), reverse=True)
            self._live = max(live_count, 1)


def _shares(penalties: Penalties) -> list[float]:
    """Weight of each slot's tokens: lower if the slot is ahead of others, 0 without a sample."""
    return [path_probability(penalty) if penalty >= 0 else 0.0 for penalty in penalties or ()]
