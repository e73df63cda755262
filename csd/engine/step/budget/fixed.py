"""Budgets with a fixed number of drafted tokens."""

from collections.abc import Sequence
from typing import Any

from csd.engine.results.record import Record
from csd.state.pool import MAX_NODES

# most drafted tokens of an automatic step: per live slot, and in total
PER_SLOT, MOST = 32, 128

# progress penalty of each slot, -1 without a sample; None while samples wait for slots
Penalties = Sequence[int] | None


def nodes_of(live_count: int, nodes: int) -> int:
    """Number of drafted tokens: `nodes`, limited by the room in the trees of `live_count` slots."""
    return min(nodes, live_count * (MAX_NODES - 1))


def most_nodes(live_count: int) -> int:
    """Upper bound of the drafted tokens of an automatic step over `live_count` slots."""
    return min(MOST, PER_SLOT * live_count)


class Budget:
    """At most `nodes` drafted tokens per step, over all samples together; base of all budgets.

    control: `auto.Controller` of an automatic budget: its step times and gain.
    """

    control: Any = None

    def __init__(self, nodes: int):
        self.nodes = nodes

    def num_draft_tokens(self, roots: int) -> int:
        """Drafted tokens to propose for a step with `roots` roots; called once per step."""
        return nodes_of(roots, self.nodes)

    def select(
        self,
        live_count: int,
        costs: list[int],
        penalties: Penalties = None,
        roots: int | None = None,
    ) -> int:
        """Number of the proposed tokens, cheapest first, that are worth verifying.

        costs: `Pool.cost` of each token plus its slot's progress penalty. penalties: of each slot.
        roots: rows of a step without drafts, by default one for each live slot.
        """
        return len(costs)

    def record_selection(self, nodes: int) -> None:
        """Record the number of a step's proposed tokens that are verified."""

    def pool_shape(self, live_count: int) -> tuple[int, int]:
        """Returns the rows and the most drafted tokens of the next pool of fixed shapes."""
        nodes = nodes_of(live_count, self.nodes)
        return live_count + nodes, nodes

    def update(self, live_count: int, record: Record) -> None:
        """Update from the record of a step over `live_count` slots; once per step, in order."""


class FixedPool(Budget):
    """At most `nodes` drafted tokens per step, in the smallest pool of `sizes` that holds them."""

    def __init__(self, nodes: int, sizes: list[int]):
        super().__init__(nodes)
        self.sizes = sizes

    def pool_shape(self, live_count: int) -> tuple[int, int]:
        wanted = live_count + nodes_of(live_count, self.nodes)
        size = next((size for size in self.sizes if size >= wanted), self.sizes[-1])
        # not limited by the live slots: each number of nodes is captured as a separate graph
        return size, min(self.nodes, size)
