"""Likeliest path of each slot in the consensus graph, for engines that verify chains only."""

from functools import partial
from typing import Any

import numpy as np

from csd.graph.consensus import ConsensusGraph
from csd.kernels.common.sorted_runs import starts
from csd.kernels.draft.constants import max_path_cost
from csd.kernels.draft.reference import Drafted, Estimates, cheapest, draft_pool
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.pool_builder import Nodes
from csd.state.slots import Slots


class ConsensusChain(ConsensusGraph):
    """Chains of each node's likeliest child, of equal ones the smaller token; in numpy on the host.

    The likeliest nodes over all slots fill the pool, so a slot's chain may end early.
    """

    def propose(
        self, slots: Slots, rows: int, noise: Any = None, *, nodes: int | None = None
    ) -> Pool:
        state = Estimates(self.table, slots, self.config, noise)
        return draft_pool(partial(_grow, state), slots, rows, nodes)


def _grow(state: Estimates, slot: np.ndarray, budget: int) -> Drafted | None:
    """The `budget` cheapest nodes of the slots' chains, cheapest first; None if there are none."""
    config = state.config
    limit = np.minimum(state.max_new - 1 - state.generated, min(config.max_depth, MAX_DEPTH))
    path = max_path_cost(config)
    cost, parent = np.zeros(slot.size, np.int64), np.full(slot.size, -1)
    context = state.context[slot]
    levels: list[Drafted] = []
    count, depth = 0, 0
    while True:
        depth += 1
        room = limit[slot] >= depth
        slot, cost, parent, context = slot[room], cost[room], parent[room], context[room]
        children = state.children(slot, context, depth, path - cost) if slot.size else None
        if children is None or not children.parent.size:
            break
        order = np.lexsort((children.token, children.edge, children.parent))
        order = order[starts(children.parent[order])]
        above = children.parent[order]
        cost, token, slot = cost[above] + children.edge[order], children.token[order], slot[above]
        source, depths = children.source[order], np.full(above.size, depth)
        levels.append(Nodes(cost, token, slot, depths, parent[above], source))
        context = np.column_stack([token.astype(np.int32), context[above, :-1]])
        parent = np.arange(above.size) + count
        count += above.size
    return cheapest(levels, budget) if levels else None
