"""The trees described in `csd/kernels/draft_tree/`, in numpy."""

from dataclasses import fields

import numpy as np

from csd.kernels.draft_tree.children import Estimates
from csd.kernels.draft_tree.constants import MAX_COST, DraftNoise, max_path_cost
from csd.kernels.draft_tree.host_pool import Drafted, put_together
from csd.kernels.runs import rank_in_run, stable_order, starts
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_DEPTH, MAX_GROUP_PENALTY, MAX_NODES, MAX_PROGRESS_PENALTY, Pool
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
    """The step's pool in `rows` >= live rows; into `out` where given.

    nodes: drafted nodes at most; as many as fit when not given.

    noise(slot [F], position [F], token [F, W]) returns g [F, W] float64 in place of the slots'
    keyed noise, for replaying recorded samples.
    """
    pool = draft_trees(Estimates(table, slots, config, noise), rows, nodes)
    target = slots.live.device
    if out is None:
        if target.type == "cpu":
            return pool
        return Pool(*(getattr(pool, f.name).to(target) for f in fields(Pool)))
    for field in fields(Pool):
        getattr(out, field.name).copy_(getattr(pool, field.name))
    return out


def draft_trees(state: Estimates, rows: int, nodes: int | None = None) -> Pool:
    """The pool on the host of the likeliest nodes, as `state` estimates them."""
    live = state.live.nonzero()[0]
    live = live[state.group[live].argsort(kind="stable")]
    most = rows - live.size if nodes is None else min(nodes, rows - live.size)
    drafted = None
    if live.size and most > 0:
        # a successor of weight 0 has a score of 0
        with np.errstate(divide="ignore"):
            drafted = _grow(state, live, most)
    return put_together(state, live, drafted, rows)


def slot_penalties(state: Estimates, live: np.ndarray) -> np.ndarray:
    """[S] int64, the larger of progress penalty and group penalty, of live slots."""
    ahead = state.generated - state.generated[live].min()
    penalty = (state.progress_penalty * ahead).clip(0, MAX_PROGRESS_PENALTY).astype(np.int64)
    if not state.config.group_penalty or (state.group[live] != state.group[live[0]]).any():
        return penalty
    mates = state.live & (state.step[:, None] == state.step)
    fewest = np.where(mates, state.generated, state.generated[:, None]).min(1)
    in_group = (state.generated - fewest).astype(np.int64) * state.config.group_penalty
    in_group = in_group.clip(0, MAX_GROUP_PENALTY)
    return np.maximum(penalty, np.where(state.sampled, 0, in_group))


def _grow(state: Estimates, slot: np.ndarray, budget: int) -> Drafted | None:
    """The `budget` cheapest nodes of the slots' trees, best first; None when there are none."""
    config = state.config
    budget = min(budget, (MAX_NODES - 1) * slot.size)
    penalty = slot_penalties(state, slot)
    limit = np.minimum(state.max_new - 1 - state.generated, min(config.max_depth, MAX_DEPTH))
    path = max_path_cost(config) + penalty
    # of nodes dearer than the budget's last one so far, none can enter the pool
    ceiling = MAX_COST
    # penalties are in costs until the pool's nodes are picked
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
        at = at[:cut]
        level = Drafted.empty(cut, context.shape[1])
        level.cost[:], level.token[:], level.slot[:] = total[:cut], token[:cut], slot[:cut]
        level.depth[:], level.parent[:], level.source[:] = depth, parent[at], source[:cut]
        level.context[:, 0], level.context[:, 1:] = token[:cut], context[at, :-1]
        levels.append(level)
        # a child is dearer than its parent by the level at least
        front = np.arange(total.searchsorted(ceiling - state.level_cost.min(), "right"))
        if front.size > config.frontier:
            front = front[rank_in(slot[front]) < config.frontier]
        slot, cost, context = slot[front], total[front], level.context[front]
        parent = front + count
        count += at.size
    if not levels:
        return None
    nodes = cheapest(levels, budget)
    nodes.cost[:] -= penalty[nodes.slot]
    return nodes


def rank_in(slot: np.ndarray) -> np.ndarray:
    """Numbers of earlier elements with the same slot."""
    order = slot.argsort(kind="stable")
    rank = np.empty_like(slot)
    rank[order] = rank_in_run(starts(slot[order]))
    return rank


def _threshold(levels: list[Drafted], cost: np.ndarray, slot: np.ndarray, budget: int) -> int:
    """Cost of the pool's last node if no more nodes came than `levels` and those given."""
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


def cheapest(levels: list[Drafted], budget: int) -> Drafted:
    """The `budget` cheapest nodes, best first."""
    cells = np.concatenate([n.cells for n in levels], 1)
    nodes = Drafted(cells, np.concatenate([n.context for n in levels]))
    # stable: equal (cost, slot) stay in order of depth, token and parent's rank
    order = stable_order(nodes.cost << 16 | nodes.slot, (MAX_COST + 1) << 16)
    if order.size >= MAX_NODES and budget >= MAX_NODES:
        order = order[rank_in(nodes.slot[order]) < MAX_NODES - 1]
    order = order[:budget]
    # of a root's child the last place is read
    place = np.full(cells.shape[1] + 1, -1)
    place[order] = np.arange(order.size)
    cells = cells[:, order]
    nodes = Drafted(cells, nodes.context[order])
    nodes.parent[:] = place[nodes.parent]
    return nodes
