"""How many drafted tokens a step verifies.

A node that is accepted with probability p commits p tokens on average. With p what its cost says of
recorded samples (`csd.state.pool.acceptance`), the best pool maximises

    ( live + c * sum of the k largest p ) / q(live + k)          over k >= 0

with c the ratio of accepted nodes to expected ones so far, and q what a step of so many rows takes,
all of it, in steps without drafts: q = 1 at k = 0. q begins as the table that was timed when the
engine started and follows what steps take (csd/engine/step_cost.py); csd/engine/turns.py has which
steps draft. Decisions depend on time, tokens never do. Steps of fixed shapes choose among pool
sizes by the same rule.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from csd.engine.record import Record
from csd.engine.step_cost import CostModel
from csd.engine.turns import Turns
from csd.state.pool import MAX_NODES, PACE, acceptance, path_probability

# most drafted tokens of a step whose shapes are not fixed: at least FEW, else up to EACH a live
# slot, MOST in all, while such a step takes at most DEAR times one of the roots alone
FEW, EACH, MOST, DEAR = 32, 8, 128, 2.0
# of `progress`: a slot that is 1 / BEHIND tokens ahead of another weighs e times less
BEHIND = 0.25
# nodes that a trial keeps, where so many are drafted
TRIED = 4
# a step asks for twice as many nodes as the last steps kept, and for so many at least: what is
# drafted and not kept takes time as well
LEAST = 8


def nodes_of(live: int, nodes: int) -> int:
    """`nodes` drafted tokens, at most as many as the trees of `live` slots have room for."""
    return min(nodes, live * (MAX_NODES - 1))


def most_nodes(live: int) -> int:
    """Drafted tokens of a step over `live` slots at most, whatever they cost."""
    return min(MOST, max(FEW, EACH * live))


# of each slot `csd.state.pool.head_starts`, -1 without a sample; None while samples wait for a slot
Starts = list[int] | None


def progress(starts: list[int], counts: list[int]) -> float:
    """Tokens by which a step moved the slots on, of which those that are behind count most.

    f(a + n) - f(a),  f(x) = -1/B ln mean(exp(-B x)), B = BEHIND

    with a the tokens by which a slot was ahead of the last one and n those that it got. f is a soft
    minimum, at most (ln slots) / B above the fewest tokens of a slot. So the progress of all steps
    adds up to the length of the call, which ends with its last sample, and yet one step's tokens
    count in every slot: the next steps draft less for a slot that is ahead.
    """
    places = [(start / PACE, n) for start, n in zip(starts, counts, strict=True) if start >= 0]
    if not places:
        return 0.0
    weights = [math.exp(-BEHIND * a) for a, _ in places]
    left = sum(w * math.exp(-BEHIND * n) for w, (_, n) in zip(weights, places, strict=True))
    return math.log(sum(weights) / left) / BEHIND


class Budget(Protocol):
    """Decides how many drafted tokens a step verifies."""

    def ask(self, live: int) -> int:
        """Drafted tokens to propose for the next step over `live` slots."""

    def choose(self, live: int, costs: list[int], starts: Starts = None) -> int:
        """Drafted tokens worth keeping of those proposed, given their costs.

        starts: of each slot; the costs have their slot's in them.
        """

    def keep(self, nodes: int) -> None:
        """Called with how many drafted tokens of a step were kept."""

    def pool(self, live: int) -> tuple[int, int]:
        """For a step of fixed shapes: rows of the next pool, and drafted tokens at most."""

    def learn(self, live: int, record: Record) -> None:
        """Called with the record of each step, over `live` slots, once it has been read."""


class FixedBudget(Budget):
    """Always at most `nodes` drafted tokens a step, over all samples together."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def ask(self, live: int) -> int:
        return nodes_of(live, self.nodes)

    def choose(self, live: int, costs: list[int], starts: Starts = None) -> int:
        return len(costs)

    def keep(self, nodes: int) -> None:
        pass

    def pool(self, live: int) -> tuple[int, int]:
        nodes = nodes_of(live, self.nodes)
        return live + nodes, nodes

    def learn(self, live: int, record: Record) -> None:
        pass


@dataclass(slots=True)
class Asked:
    """What "auto" did in a step whose record has not been read."""

    drafts: bool  # whether drafts were asked for
    starts: Starts = None
    worth: float | None = None  # tokens that the kept ones promise a slot; None: not known


class Learner:
    """What "auto" learns from the records of its steps, and which steps it lets draft."""

    def __init__(self, cost: CostModel):
        self.late, self.calibration = cost.late, cost.late.calibrate()
        self.turns = Turns(self.late)
        self.asked: deque[Asked] = deque()  # of each step whose record has not been read

    def drafts(self) -> bool:
        """Whether the next step may draft; called once a step."""
        self.asked.append(Asked(self.turns.take()))
        return self.asked[-1].drafts

    def learn(self, live: int, base: int, record: Record) -> None:
        """From a step over `live` slots; base: rows of one without drafts."""
        asked = self.asked.popleft() if self.asked else Asked(bool(record.costs))
        self.turns.read(asked.drafts)
        live = max(live, 1)
        promised, got = record.expected / live, record.accepted / live
        if asked.starts is not None and asked.worth is not None:
            promised, got = asked.worth, progress(asked.starts, record.count) - 1
        if record.costs:
            self.calibration.learn(promised * live, got * live)
        seconds = record.draft_seconds + record.model_seconds
        if not seconds:
            return
        if not asked.drafts:
            self.turns.learn_plain(self.late.learn_plain(record.rows, seconds))
        elif record.costs:
            surprise = self.late.learn_drafted(base, record.rows, seconds)
            tokens, got = 1 + float(self.calibration) * promised, 1 + got
            took = self.late.curve(base, record.rows)(record.rows)
            self.turns.learn_drafted(tokens / took, got, took, surprise)
        else:
            self.late.learn_nothing()
            plain = self.late.plain(base)
            self.turns.learn_look(seconds / plain, record.draft_seconds / plain)


class AutoBudget(FixedBudget):
    """The pool that maximises expected tokens a second; pauses drafting while it does not pay."""

    def __init__(self, cost: CostModel):
        super().__init__(FEW)
        self._learner = Learner(cost)
        self._kept = float(MOST)  # of late

    def ask(self, live: int) -> int:
        if not self._learner.drafts():
            return 0
        nodes = max(LEAST, live, int(2 * self._kept))
        return nodes if nodes <= FEW else min(self.most(live), nodes)

    def most(self, live: int) -> int:
        """Drafted tokens worth proposing: while rows are cheap."""
        most = most_nodes(live)
        ratio = self._learner.late.curve(live, live + most)
        return next((k for k in range(most, FEW, -1) if ratio(live + k) <= DEAR), FEW)

    def choose(self, live: int, costs: list[int], starts: Starts = None) -> int:
        learner = self._learner
        weight = float(live)
        if starts is not None:
            weight = sum(path_probability(start) for start in starts if start >= 0)
        calibration = float(learner.calibration)
        if learner.turns.trial:
            # what drafts bring may have changed as well
            calibration = max(calibration, 1.0)
        ratio = learner.late.curve(live, live + len(costs))
        least = min(TRIED, len(costs)) if learner.turns.trial else 0
        best, best_rate, worth, promised = 0, 0.0 if least else 1.0, 0.0, 0.0
        for k, cost in enumerate(sorted(costs), 1):
            promised += acceptance(cost) / weight
            rate = (1 + calibration * promised) / ratio(live + k)
            if rate > best_rate and k >= least:
                best, best_rate, worth = k, rate, promised
        if learner.asked:
            learner.asked[-1].starts, learner.asked[-1].worth = starts, worth
        return best

    def keep(self, nodes: int) -> None:
        self._kept = max(nodes, self._kept / 2)
        if not nodes:
            self._learner.turns.miss()

    def learn(self, live: int, record: Record) -> None:
        self._learner.learn(live, live, record)


class FixedPool(FixedBudget):
    """At most `nodes` drafted tokens a step, in the smallest of `sizes` that holds them."""

    def __init__(self, nodes: int, sizes: list[int]):
        super().__init__(nodes)
        self.sizes = sizes

    def pool(self, live: int) -> tuple[int, int]:
        wanted = live + nodes_of(live, self.nodes)
        size = next((size for size in self.sizes if size >= wanted), self.sizes[-1])
        # not cut by the slots: each number is captured for itself
        return size, min(self.nodes, size)


class AutoPool(FixedPool):
    """The pool size of most expected tokens a second; drafts fill it.

    The value of nodes comes from an earlier step: what its costs promise, as many a live slot as
    then, times the share of expected nodes that were accepted so far. Nodes beyond those that were
    drafted count half as much as the last of them.
    """

    def __init__(self, cost: CostModel, sizes: list[int]):
        super().__init__(0, sizes)
        self._learner = Learner(cost)
        self._worth: list[float] = []  # acceptance of a step's nodes, falling
        self._live = 1  # slots it had

    def expect(self, live: int, nodes: int) -> float:
        """Accepted nodes of `nodes` drafted ones."""
        if not self._worth:
            # before the first record: half of the slots' next tokens are guessed
            return min(nodes, live) / 2
        share = live / self._live
        known = nodes / share
        full = min(int(known), len(self._worth))
        beyond = (known - full) * self._worth[-1] / 2
        return (sum(self._worth[:full]) + beyond) * share * float(self._learner.calibration)

    def pool(self, live: int) -> tuple[int, int]:
        sizes = [size for size in self.sizes if size >= live] or self.sizes[-1:]
        base, turns = sizes[0], self._learner.turns
        if not self._learner.drafts():
            return base, 0

        def rate(m: int) -> float:
            return (1 + self.expect(live, m - live) / live) / self._learner.late.ratio(base, m)

        best = max(sizes, key=rate)
        if rate(best) < 1 and not turns.trial:
            turns.miss()
            return base, 0
        return best, best

    def learn(self, live: int, record: Record) -> None:
        base = next((size for size in self.sizes if size >= live), self.sizes[-1])
        self._learner.learn(live, base, record)
        if record.costs:
            worth = map(acceptance, record.costs)
            self._worth, self._live = sorted(worth, reverse=True), max(live, 1)
