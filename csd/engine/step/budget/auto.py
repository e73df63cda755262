"""The automatic budgets: the number of drafted tokens with the highest expected token rate."""

from collections import deque

from csd.engine.results.record import Record
from csd.engine.step.budget.estimator import RECENT, StepTimeEstimator, StepTimeTable
from csd.engine.step.budget.fixed import PER_SLOT, FixedBudget, FixedPool, Penalties, most_nodes
from csd.engine.step.budget.gain import Gain
from csd.engine.step.budget.gate import SpeculationGate
from csd.state.pool import acceptance, path_probability


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


class AutoBudget(FixedBudget):
    """Chooses the number of nodes with the most expected tokens per second; 0 if none pay."""

    def __init__(self, table: StepTimeTable):
        super().__init__(0)
        self.control = Controller(table)
        self._kept = PER_SLOT  # number of nodes that recent steps verified
        self._penalties: Penalties = None

    def num_draft_tokens(self, live_count: int) -> int:
        if not self.control.should_draft():
            return 0
        return min(most_nodes(live_count), 2 * max(live_count, self._kept))

    def select(self, live_count: int, costs: list[int], penalties: Penalties = None) -> int:
        control, self._penalties = self.control, penalties
        calibration, best_rate = control.calibration, 1.0
        if control.gate.probe:
            # acceptance may also have changed since the last drafts
            calibration, best_rate = max(calibration, 1.0), 0.0
        weight = float(live_count) if penalties is None else sum(_shares(penalties))
        best, promised = 0, 0.0
        for k, cost in enumerate(sorted(costs), 1):
            promised += acceptance(cost) / weight
            rate = (1 + calibration * promised) / control.times.ratio(live_count, live_count + k)
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
        self.control.update(live_count, live_count, record, shares)


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
