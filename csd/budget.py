"""How many drafted tokens a step verifies.

A step over M rows costs t(M) seconds, measured once an engine. A node whose path has probability p
commits p tokens on average, so the best pool maximises

    ( live + c * sum of the k largest p ) / ( t(live + k) + o )        over k >= 0

with c the ratio of accepted nodes to expected ones so far, and o what steps took beyond t, which is
measured on empty caches: reading what is in them, and whatever else the machine has to do. Where
nothing pays, k is 0. Steps of fixed shapes choose among pool sizes by the same rule.
"""

from csd.cost import CostModel
from csd.pool import path_probability
from csd.record import Record

# drafted tokens of a step whose shapes are not fixed
MOST_NODES = 32


class Calibration:
    """Accepted drafted tokens for each one that was expected; about the last 200 of these count."""

    def __init__(self) -> None:
        self._expected = self._accepted = 4.0

    def __float__(self) -> float:
        return self._accepted / self._expected

    def learn(self, record: Record) -> None:
        expected = record.expected
        fade = 1 - min(expected, 100.0) / 200
        self._expected = self._expected * fade + expected
        self._accepted = self._accepted * fade + record.accepted


class Overhead:
    """Seconds that steps take beyond the measured cost of their rows; the last few count."""

    def __init__(self, cost: CostModel):
        self._cost, self._seconds = cost, 0.0

    def __float__(self) -> float:
        return max(self._seconds, 0.0)

    def learn(self, record: Record) -> None:
        """From a step whose time is known."""
        if record.model_seconds:
            over = record.model_seconds - self._cost(record.rows)
            self._seconds += 0.2 * (over - self._seconds)


class FixedBudget:
    """Always at most `nodes` drafted tokens a step, over all samples together."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def ask(self, live: int) -> int:
        """Drafted tokens to propose for the next step."""
        return self.nodes

    def choose(self, live: int, costs: list[int]) -> int:
        """Drafted tokens worth keeping of those proposed, given their costs; changes nothing."""
        return len(costs)

    def keep(self, nodes: int) -> None:
        """So many drafted tokens were kept of a step's proposed ones."""

    def learn(self, live: int, record: Record) -> None:
        """What came of a step over `live` slots: its `csd.record.Record`."""


class AutoBudget(FixedBudget):
    """The pool that maximises expected tokens a second; rests when drafts keep not paying."""

    def __init__(self, cost: CostModel, max_nodes: int = MOST_NODES):
        super().__init__(max_nodes)
        self._step_seconds = cost
        self._calibration, self._overhead = Calibration(), Overhead(cost)
        self._propose_seconds = 0.0
        self._misses = self._rest = 0

    def ask(self, live: int) -> int:
        if self._rest:
            self._rest -= 1
            return 0
        return self.nodes

    def choose(self, live: int, costs: list[int]) -> int:
        calibration = float(self._calibration)
        overhead = float(self._overhead)
        best, best_rate, tokens = 0, live / (self._step_seconds(live) + overhead), float(live)
        overhead += self._propose_seconds
        for k, cost in enumerate(sorted(costs), 1):
            tokens += calibration * path_probability(cost)
            rate = tokens / (self._step_seconds(live + k) + overhead)
            if rate > best_rate:
                best, best_rate = k, rate
        return best

    def keep(self, nodes: int) -> None:
        self._misses = 0 if nodes else self._misses + 1
        # after n steps in a row without a paying node, look again only after 2^n steps
        self._rest = 0 if nodes else 2 ** min(self._misses, 4)

    def learn(self, live: int, record: Record) -> None:
        if record.costs:
            self._calibration.learn(record)
            self._propose_seconds += 0.2 * (record.draft_seconds - self._propose_seconds)
        self._overhead.learn(record)


class FixedPool:
    """At most `nodes` drafted tokens a step, in the smallest of `sizes` that holds them."""

    def __init__(self, nodes: int, sizes: list[int]):
        self.nodes, self.sizes = nodes, sizes

    def ask(self, live: int) -> tuple[int, int]:
        """Rows of the next step's pool, and drafted tokens at most."""
        fits = [size for size in self.sizes if size >= live + self.nodes]
        return fits[0] if fits else self.sizes[-1], self.nodes

    def learn(self, live: int, record: Record) -> None:
        """As of `FixedBudget`."""


class AutoPool(FixedPool):
    """The pool size of most expected tokens a second; drafts fill it.

    What nodes are worth is read off an earlier step: its path probabilities, as many a live slot as
    then, times the share of expected nodes that were accepted so far. Nodes beyond those that were
    drafted count half as much as the last of them.
    """

    def __init__(self, cost: CostModel, sizes: list[int]):
        super().__init__(0, sizes)
        self._step_seconds = cost
        self._calibration, self._overhead = Calibration(), Overhead(cost)
        self._worth: list[float] = []  # path probabilities of a step, falling
        self._live = 1  # slots it had

    def expect(self, live: int, nodes: int) -> float:
        """Accepted nodes of `nodes` drafted ones."""
        if not self._worth:
            # nothing known: each slot's next token is guessed every other time
            return min(nodes, live) / 2
        share = live / self._live
        known = nodes / share
        full = min(int(known), len(self._worth))
        beyond = (known - full) * self._worth[-1] / 2
        return (sum(self._worth[:full]) + beyond) * share * float(self._calibration)

    def ask(self, live: int) -> tuple[int, int]:
        sizes = [size for size in self.sizes if size >= live] or self.sizes[-1:]
        overhead = float(self._overhead)

        def rate(m: int) -> float:
            return (live + self.expect(live, m - live)) / (self._step_seconds(m) + overhead)

        best = max(sizes, key=rate)
        return best, best

    def learn(self, live: int, record: Record) -> None:
        self._calibration.learn(record)
        self._overhead.learn(record)
        if record.costs:
            worth = map(path_probability, record.costs)
            self._worth, self._live = sorted(worth, reverse=True), max(live, 1)
