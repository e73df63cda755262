"""Engine steps of scripted cost and scripted drafts, for the budgets."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import log2

import pytest

from csd.engine.results.record import Record
from csd.engine.step.budget import AutoPool, Budget, StepTimeTable
from csd.state.pool import COST_ONE, acceptance


def costs(*probabilities):
    """`Pool.cost` of nodes that are accepted so often where all is as usual."""
    return [cost_of(p) for p in probabilities]


@cache
def cost_of(probability):
    score = round(-log2(probability ** (1 / 0.9) / 1.25) * COST_ONE)
    assert acceptance(score) == pytest.approx(probability, abs=1e-5)
    return score


def record(probabilities, accepted, draft_seconds=0.0, model_seconds=0.0, rows=None, live=1):
    """Make the record of a step that drafted these nodes over `live` slots, in turn."""
    drafted = len(probabilities)
    values = dict(
        count=[1 + len(range(s, accepted, live)) for s in range(live)],
        nodes=[1 + len(range(s, drafted, live)) for s in range(live)],
        costs=costs(*probabilities),
        rows=rows or live + drafted,
        draft_seconds=draft_seconds,
        model_seconds=model_seconds,
    )
    return Record(**dict.fromkeys(Record.__dataclass_fields__) | values)


@dataclass
class Machine:
    """Steps over `live` slots. Each slot's nodes are accepted as often as `chain(step)`
    has it, times `true(step)`."""

    seconds: Callable[[int], float]  # of a step by its rows
    chain: Callable[[int], list[float]]
    true: Callable[[int], float] = lambda step: 1.0
    load: Callable[[int], float] = lambda step: 1.0
    propose: float = 0.0  # seconds
    live: int = 8
    noise: float = 0.1  # of a step's logarithm
    slow: float = 0.02  # share of steps that take four times as long
    seed: int = 0

    def run(self, budget: Budget | None, steps: int, begin: int = 0) -> "Run":
        """Tokens and seconds of so many steps; without a budget, without drafts."""
        run, lag = Run([], [], []), []
        static = isinstance(budget, AutoPool)
        for step in range(begin, begin + steps):
            # the same disturbance whatever the step does
            rng = random.Random(self.seed * 10_000 + step)
            rows, chosen = self.live, []
            spent = 0.0
            if budget and static:
                rows, nodes = budget.pool_shape(self.live)
                chosen = self.drafted(step)[: max(nodes - self.live, 0)]
            elif budget and (nodes := budget.num_draft_tokens(self.live)):
                drafted = self.drafted(step)[:nodes]
                keep = budget.select(self.live, costs(*drafted))
                budget.record_selection(keep)
                chosen, rows, spent = drafted[:keep], self.live + keep, self.propose
            spent += self.propose if static and chosen else 0.0
            noisy = self.load(step) * rng.lognormvariate(0, self.noise)
            if rng.random() < self.slow:
                noisy *= 4
            share = self.true(step)
            accepted = sum(rng.random() < share * p for p in chosen)
            run.tokens.append(self.live + accepted)
            run.seconds.append((self.seconds(rows) + spent) * noisy)
            run.nodes.append(len(chosen))
            if budget:
                draft, model = spent * noisy, self.seconds(rows) * noisy
                lag.append(record(chosen, accepted, draft, model, rows, self.live))
                if len(lag) > static:
                    budget.update(self.live, lag.pop(0))
        return run

    def drafted(self, step: int) -> list[float]:
        """Path probabilities of all slots' nodes, likeliest first."""
        return [p for p in sorted(self.chain(step), reverse=True) for _ in range(self.live)]


@dataclass
class Run:
    tokens: list[int]
    seconds: list[float]
    nodes: list[int]

    def rate(self, begin: int = 0, end: int | None = None) -> float:
        return sum(self.tokens[begin:end]) / sum(self.seconds[begin:end])


def flat():
    """A table in which rows are free."""
    return StepTimeTable([1, 64], [1.0, 1.0])


def steep():
    """A table in which each row costs what the first does."""
    return StepTimeTable([1, 2, 64], [1.0, 2.0, 64.0])


def dear(rows):
    """Seconds of a step whose rows beyond 16 cost."""
    return 1 + 0.03 * max(rows - 16, 0)


def cheap(rows):
    """Seconds of a step whose rows beyond 16 cost little."""
    return 1 + 0.008 * max(rows - 16, 0)


def table(seconds, disturbed):
    """Step times measured at a start; rows after the first cost `disturbed` times as much."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    return StepTimeTable(sizes, [1 + (seconds(m) - 1) * disturbed for m in sizes])


def weak(step):
    """Probabilities of a chain's nodes that seldom come true."""
    return [0.3, 0.15]


def strong(step):
    """Probabilities of a chain's nodes that often come true."""
    return [0.75, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.01]
