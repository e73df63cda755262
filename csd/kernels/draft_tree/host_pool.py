"""The pool of roots and drafted nodes, put together in numpy."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from csd.state.pool import Pool

if TYPE_CHECKING:
    from csd.kernels.draft_tree.children import Estimates


class Drafted(NamedTuple):
    """Drafted nodes [n] in order."""

    cells: np.ndarray  # [6, n] int64: the properties below
    context: np.ndarray  # [n, N]

    @classmethod
    def empty(cls, count: int, N: int) -> "Drafted":
        return cls(np.empty((6, count), np.int64), np.empty((count, N), np.int32))

    @property
    def cost(self) -> np.ndarray:
        return self.cells[0]

    @property
    def token(self) -> np.ndarray:
        return self.cells[1]

    @property
    def slot(self) -> np.ndarray:
        return self.cells[2]

    @property
    def depth(self) -> np.ndarray:
        return self.cells[3]

    @property
    def parent(self) -> np.ndarray:
        """Place of the parent among the nodes, -1 for a root's child."""
        return self.cells[4]

    @property
    def source(self) -> np.ndarray:
        return self.cells[5]


def put_together(state: "Estimates", live: np.ndarray, nodes: Drafted | None, rows: int) -> Pool:
    """A pool on the host: the roots of the slots `live`, by group and slot, and behind each its
    nodes, which are given best first."""
    S, G, N = state.live.size, state.group_key.size, state.context.shape[1]
    pool = Pool.empty(rows, S, G, N)
    drafted = np.zeros(live.size, np.int64)
    if nodes is not None:
        # which of the pool's slots a node is of
        place_of = np.zeros(S, np.int64)
        place_of[live] = np.arange(live.size)
        owner = place_of[nodes.slot]
        drafted = np.bincount(owner, minlength=live.size)
    end = (drafted + 1).cumsum()
    start = end - drafted - 1
    group = state.group[live]
    position = state.prompt_len[group] + state.generated[live]

    ancestors = pool.ancestors.numpy()
    ancestors[start] = 1
    pool.token.numpy()[start] = state.context[live, 0]
    pool.slot.numpy()[start] = live
    pool.position.numpy()[start] = position
    pool.context.numpy()[start] = state.context[live]
    pool.slot_start.numpy()[live] = start
    pool.slot_nodes.numpy()[live] = drafted + 1
    bounds = np.append(start, end[-1:].sum())
    pool.group_start.numpy()[:] = bounds[group.searchsorted(np.arange(G + 1))]
    if nodes is None:
        return pool

    order = owner.argsort(kind="stable")
    row = np.empty_like(order)
    row[order] = np.arange(order.size)
    row += owner + 1
    root = start[owner]
    parent = np.where(nodes.parent >= 0, row[nodes.parent], root)
    # the 64th node's bit is the sign
    ancestors[row] = np.int64(1) << (row - root)
    for depth in range(1, nodes.depth.max() + 1):
        at = nodes.depth == depth
        ancestors[row[at]] |= ancestors[parent[at]]
    pool.token.numpy()[row] = nodes.token
    pool.parent.numpy()[row] = parent
    pool.slot.numpy()[row] = nodes.slot
    pool.depth.numpy()[row] = nodes.depth
    pool.position.numpy()[row] = position[owner] + nodes.depth
    pool.cost.numpy()[row] = nodes.cost
    pool.source.numpy()[row] = nodes.source
    pool.context.numpy()[row] = nodes.context
    return pool
