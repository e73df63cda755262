"""The trees described in `csd/kernels/draft_tree/`, in numpy."""

from dataclasses import fields
from functools import partial

import numpy as np

from csd.kernels.draft_tree.children import Estimates
from csd.kernels.draft_tree.constants import MAX_COST, DraftNoise, max_path_cost
from csd.kernels.draft_tree.select import Drafted, cheapest, draft_pool, rank_in
from csd.kernels.sorted_runs import stable_order
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool
from csd.state.pool_builder import Nodes, slot_penalties
from csd.state.slots import Slots


def draft_tree_ref(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: DraftNoise | None = None,
    out: Pool | None = None,
    nodes: int | None = None,
) -> Pool:
    """Returns the step's pool of `rows` rows, written to `out` if given.

    rows: at least the number of live slots. nodes: most drafted nodes, by default as many as fit.

    noise(slot [F], position [F], token [F, W]) returns g [F, W] float64 in place of the slots'
    keyed noise, for replaying recorded samples.
    """
    state = Estimates(table, slots, config, noise)
    penalty = slot_penalties(slots, config.group_penalty).numpy(force=True)
    pool = draft_pool(partial(_grow, state, penalty), slots, rows, nodes)
    if out is None:
        return pool
    for field in fields(Pool):
        getattr(out, field.name).copy_(getattr(pool, field.name))
    return out


def _grow(state: Estimates, penalty: np.ndarray, slot: np.ndarray, budget: int) -> Drafted | None:
    """The `budget` cheapest nodes of the slots' trees, cheapest first; None if there are none."""
    config = state.config
    budget = min(budget, (MAX_NODES - 1) * slot.size)
    limit = np.minimum(state.max_new - 1 - state.generated, min(config.max_depth, MAX_DEPTH))
    path = max_path_cost(config) + penalty
    # nodes dearer than the budget's last one so far cannot enter the pool
    ceiling = MAX_COST
    # costs include penalties until the pool's nodes are selected
    cost, parent, context = penalty[slot], np.full_like(slot, -1), state.context[slot]
    levels: list[Drafted] = []
    count, depth = 0, 0
    while True:
        depth += 1
        room = limit[slot] >= depth
        if not room.all():
            slot, cost, parent, context = slot[room], cost[room], parent[room], context[room]
        if not slot.size:
            break
        found = state.children(slot, context, depth, np.minimum(path[slot], ceiling) - cost)
        if found is None or not found.parent.size:
            break
        total = cost[found.parent] + found.edge
        order = stable_order(total << 31 | found.token, (MAX_COST + 1) << 31)
        total = total[order]
        at, token, source = (x[order] for x in (found.parent, found.token, found.source))
        slot = slot[at]
        ceiling = min(ceiling, _threshold(levels, total, slot, budget))
        cut = total.searchsorted(ceiling, "right")
        at, depths = at[:cut], np.full(cut, depth)
        levels.append(Nodes(total[:cut], token[:cut], slot[:cut], depths, parent[at], source[:cut]))
        # a child costs more than its parent by at least the level's cost
        front = np.arange(total.searchsorted(ceiling - state.level_cost.min(), "right"))
        if front.size > config.frontier:
            front = front[rank_in(slot[front]) < config.frontier]
        slot, cost = slot[front], total[front]
        context = np.column_stack([token[front].astype(np.int32), context[at[front], :-1]])
        parent = front + count
        count += at.size
    if not levels:
        return None
    nodes = cheapest(levels, budget)
    return nodes._replace(cost=nodes.cost - penalty[nodes.slot])


def _threshold(levels: list[Drafted], cost: np.ndarray, slot: np.ndarray, budget: int) -> int:
    """Cost of the pool's last node if it had only the nodes of `levels` and those given."""
    cost = np.concatenate([*(n.cost for n in levels), cost])
    if cost.size < budget:
        return MAX_COST
    if budget >= MAX_NODES:
        slot = np.concatenate([*(n.slot for n in levels), slot])
        if np.bincount(slot).max() >= MAX_NODES:
            order = cost.argsort(kind="stable")
            cost = cost[order[rank_in(slot[order]) < MAX_NODES - 1]]
            if cost.size < budget:
                return MAX_COST
    return int(np.partition(cost, budget - 1)[budget - 1])
