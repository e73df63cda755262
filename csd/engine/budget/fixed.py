"""Budgets with a fixed number of drafted tokens, and the protocol of all budgets."""

from collections.abc import Sequence
from typing import Protocol

from csd.engine.step_record import Record
from csd.state.pool import MAX_NODES

# most drafted tokens of an automatic step: per live slot, and in total
PER_SLOT, MOST = 32, 128

# progress penalty of each slot, -1 without a sample; None while samples wait for slots
Penalties = Sequence[int] | None


def nodes_of(live: int, nodes: int) -> int:
    """Number of drafted tokens: `nodes`, limited by the room in the trees of `live` slots."""
    return min(nodes, live * (MAX_NODES - 1))


def most_nodes(live: int) -> int:
    """Upper bound of the drafted tokens of an automatic step over `live` slots."""
    return min(MOST, PER_SLOT * live)


class Budget(Protocol):
    """Protocol that chooses the number of drafted tokens that a step verifies."""

    def ask(self, live: int) -> int:
        """Drafted tokens to propose for the next step over `live` slots; called once per step."""

    def choose(self, live: int, costs: list[int], penalties: Penalties = None) -> int:
        """Number of the proposed tokens, cheapest first, that are worth verifying.

        costs: `Pool.cost` of each token plus its slot's progress penalty. penalties: of each slot.
        """

    def keep(self, nodes: int) -> None:
        """Record the number of a step's proposed tokens that are verified."""

    def pool(self, live: int) -> tuple[int, int]:
        """Returns the rows and the most drafted tokens of the next pool of fixed shapes."""

    def learn(self, live: int, record: Record) -> None:
        """Update from the record of a step over `live` slots; called once per step, in order."""


class FixedBudget(Budget):
    """At most `nodes` drafted tokens per step, over all samples together."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def ask(self, live: int) -> int:
        return nodes_of(live, self.nodes)

    def choose(self, live: int, costs: list[int], penalties: Penalties = None) -> int:
        return len(costs)

    def keep(self, nodes: int) -> None:
        pass

    def pool(self, live: int) -> tuple[int, int]:
        nodes = nodes_of(live, self.nodes)
        return live + nodes, nodes

    def learn(self, live: int, record: Record) -> None:
        pass


class FixedPool(FixedBudget):
    """At most `nodes` drafted tokens per step, in the smallest pool of `sizes` that holds them."""

    def __init__(self, nodes: int, sizes: list[int]):
        super().__init__(nodes)
        self.sizes = sizes

    def pool(self, live: int) -> tuple[int, int]:
        wanted = live + nodes_of(live, self.nodes)
        size = next((size for size in self.sizes if size >= wanted), self.sizes[-1])
        # not limited by the live slots: each number of nodes is captured as a separate graph
        return size, min(self.nodes, size)
