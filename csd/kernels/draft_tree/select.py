"""The cheapest drafted nodes of all slots, in numpy, and their pool."""

from collections.abc import Callable

import numpy as np

from csd.kernels.draft_tree.constants import MAX_COST
from csd.kernels.sorted_runs import rank_in_run, stable_order, starts
from csd.state.pool import MAX_NODES, Pool
from csd.state.pool_builder import Nodes, live_by_group, pool_of
from csd.state.slots import Slots

Drafted = Nodes[np.ndarray]


def draft_pool(
    grow: Callable[[np.ndarray, int], Drafted | None], slots: Slots, rows: int, nodes: int | None
) -> Pool:
    """Returns the pool of the nodes that `grow(live slots, number of nodes)` drafts.

    nodes: most drafted nodes, by default as many as fit.
    """
    live = live_by_group(slots)
    most = rows - live.size if nodes is None else min(nodes, rows - live.size)
    drafted = None
    if live.size and most > 0:
        # a successor of weight 0 has a score of 0
        with np.errstate(divide="ignore"):
            drafted = grow(live, most)
    return pool_of(slots, rows, drafted)


def rank_in(slot: np.ndarray) -> np.ndarray:
    """Number of earlier elements with the same slot, for each element."""
    order = slot.argsort(kind="stable")
    rank = np.empty_like(slot)
    rank[order] = rank_in_run(starts(slot[order]))
    return rank


def cheapest(levels: list[Drafted], budget: int) -> Drafted:
    """The `budget` cheapest nodes, cheapest first.

    Parents are indices among all nodes of `levels`, and in the result indices among its nodes.
    """
    nodes = Nodes(*(np.concatenate(x) for x in zip(*levels, strict=True)))
    # stable: equal (cost, slot) stay in order of depth, token and parent's rank
    order = stable_order(nodes.cost << 16 | nodes.slot, (MAX_COST + 1) << 16)
    if order.size >= MAX_NODES and budget >= MAX_NODES:
        order = order[rank_in(nodes.slot[order]) < MAX_NODES - 1]
    order = order[:budget]
    # a root's child has parent -1, so it reads the last element, -1
    place = np.full(nodes.cost.size + 1, -1)
    place[order] = np.arange(order.size)
    nodes = Nodes(*(x[order] for x in nodes))
    return nodes._replace(parent=place[nodes.parent])
