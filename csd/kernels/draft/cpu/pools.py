"""Pools of roots, node costs and pruning of pools; references: `csd.state.pool_builder`."""

import numpy as np
import torch

from csd.kernels.draft.constants import POOL
from csd.kernels.draft.cpu.grow import COST, DEPTH, PARENT, SLOT, SOURCE, TOKEN
from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import places_in_order
from csd.kernels.numba.tensors import require
from csd.state.pool import MAX_GROUP_PENALTY, MAX_PROGRESS_PENALTY, ROOT, Pool, empty_pool
from csd.state.pool_builder import allocate_pool, live_by_group
from csd.state.record import on_host
from csd.state.slots import Slots


@loop
def fill(
    live,  # [L], slots by group
    chosen,  # indices of nodes, best first
    node,  # [n, 6], columns as in `grow.py`
    context,  # [n, N]
    penalty,  # [S], subtracted from the nodes' costs
    group,  # [S]
    position,  # [S], of the roots
    pool,  # arrays of a `Pool`, written
):
    """Write the roots, which are the first L nodes, and the chosen nodes to a pool."""
    slot_start, slot_nodes, group_start = pool.slot_start, pool.slot_nodes, pool.group_start
    token, parent, ancestors, cost = pool.token, pool.parent, pool.ancestors, pool.cost
    L, used = live.shape[0], live.shape[0] + chosen.shape[0]
    for s in range(slot_start.shape[0]):
        slot_start[s], slot_nodes[s] = 0, 0
    for i in range(L):
        slot_nodes[live[i]] = 1
    for i in chosen:
        slot_nodes[node[i, SLOT]] += 1
    row, g = 0, 0
    for i in range(L):
        while g <= group[live[i]]:
            group_start[g] = row
            g += 1
        slot_start[live[i]] = row
        row += slot_nodes[live[i]]
    while g < group_start.shape[0]:
        group_start[g] = row
        g += 1
    # rows of nodes, roots first
    row_of, filled = np.empty(node.shape[0], np.int64), np.zeros(slot_start.shape[0], np.int64)
    for k in range(used):
        i = k if k < L else chosen[k - L]
        s = node[i, SLOT]
        m = slot_start[s] + filled[s]
        bit = np.int64(1) << filled[s]
        filled[s] += 1
        row_of[i] = m
        token[m], pool.slot[m], pool.depth[m] = node[i, TOKEN], s, node[i, DEPTH]
        pool.position[m], pool.source[m] = position[s] + node[i, DEPTH], node[i, SOURCE]
        for n in range(context.shape[1]):
            pool.context[m, n] = context[i, n]
        parent[m], ancestors[m], cost[m] = -1, bit, 0
        if k >= L:
            parent[m] = row_of[node[i, PARENT]]
            ancestors[m] |= ancestors[parent[m]]
            cost[m] = node[i, COST] - penalty[s]
    for m in range(used, token.shape[0]):
        token[m], parent[m], pool.slot[m], pool.depth[m], pool.position[m] = -1, -1, -1, 0, 0
        ancestors[m], cost[m], pool.source[m] = 0, 0, ROOT
        for n in range(context.shape[1]):
            pool.context[m, n] = -1


def root_positions(slots: Slots) -> np.ndarray:
    """Position of each slot's last committed token, [S]."""
    return slots.prompt_len.numpy()[slots.group.numpy()] + slots.generated.numpy()


def roots(slots: Slots, rows: int) -> Pool:
    """Pool of the live slots' roots only, in `rows` >= live rows; see `pool_builder.roots`."""
    tensors = slots.live, slots.group, slots.generated, slots.prompt_len, slots.context
    require(on_host(*tensors), "roots", *tensors)
    live = live_by_group(slots)
    context = slots.context.numpy()[live]
    node = np.zeros((live.size, 6), np.int64)
    node[:, TOKEN], node[:, SLOT] = context[:, 0], live
    node[:, PARENT], node[:, SOURCE] = -1, ROOT
    pool = allocate_pool(slots, rows)
    none, no_start = np.empty(0, np.int64), np.zeros(slots.count, np.int64)
    group, position = slots.group.numpy(), root_positions(slots)
    fill(live, none, node, context, no_start, group, position, POOL.arrays(pool))
    return pool


@loop
def _progress_penalties(live, generated, progress_penalty):
    """`pool_builder.progress_penalties` of the slots `live`, 0 for others: [S] int64."""
    penalties, fewest = np.zeros(generated.shape[0], np.int64), np.int64(1) << 40
    for s in live:
        fewest = min(fewest, np.int64(generated[s]))
    for s in live:
        ahead = progress_penalty[s] * (np.int64(generated[s]) - fewest)
        penalties[s] = min(max(ahead, 0), MAX_PROGRESS_PENALTY)
    return penalties


@loop
def slot_penalties(live, slots, group_penalty):
    """`pool_builder.slot_penalties` of the slots `live`, 0 for others: [S] int64.

    slots: arrays of the `Slots`.
    """
    group, generated, step = slots.group, slots.generated, slots.step
    penalties = _progress_penalties(live, generated, slots.progress_penalty)
    together = True
    for s in live:
        together &= group[s] == group[live[0]]
    for s in live:
        if group_penalty and together and slots.temperature[s] <= 0:
            last = generated[s]
            for t in live:
                if step[t] == step[s]:
                    last = min(last, generated[t])
            in_group = min(np.int64(generated[s] - last) * group_penalty, MAX_GROUP_PENALTY)
            penalties[s] = max(penalties[s], in_group)
    return penalties


@loop
def _node_costs(live, slot, depth, cost, generated, progress_penalty, penalised, penalties, costs):
    """Writes penalised [M], penalties [S] and costs [M]; returns the number of drafted nodes."""
    penalty, drafted = _progress_penalties(live, generated, progress_penalty), 0
    penalties[:] = -1
    for s in live:
        penalties[s] = penalty[s]
    for m in range(slot.shape[0]):
        penalised[m] = cost[m]
        if depth[m] > 0:
            penalised[m] += penalty[slot[m]]
            costs[drafted] = penalised[m]
            drafted += 1
    return drafted


def node_costs(pool: Pool, slots: Slots) -> tuple[torch.Tensor, list[int], list[int] | None]:
    """Costs by which a step's nodes are selected, with penalties; see `pool_builder.node_costs`.

    Returns those of all rows [M] int32, those of drafted nodes, and each slot's penalty or None.
    """
    tensors = pool.slot, pool.depth, pool.cost, slots.generated, slots.progress_penalty
    require(on_host(slots.live, *tensors), "node_costs", *tensors)
    penalised, costs = torch.empty_like(pool.cost), np.empty(pool.rows, np.int32)
    penalties = np.empty(slots.count, np.int32)
    arrays_of = (x.numpy() for x in tensors)
    drafted = _node_costs(live_by_group(slots), *arrays_of, penalised.numpy(), penalties, costs)
    penalises = slots.count > 0 and bool(slots.progress_penalty.numpy()[0])
    return penalised, costs[:drafted].tolist(), penalties.tolist() if penalises else None


@loop
def _prune(rows, cost, pool, out):
    """Write the `rows` cheapest rows of a pool to `out`; both are arrays of a `Pool`."""
    slot, parent = pool.slot, pool.parent
    M, key = slot.shape[0], np.empty(slot.shape[0], np.int64)
    for m in range(M):
        key[m] = cost[m] if slot[m] >= 0 else np.int64(1) << 40
    # number of kept rows before each row
    before = np.zeros(M + 1, np.int64)
    for m in places_in_order(key)[:rows]:
        before[m + 1] = 1
    for m in range(M):
        before[m + 1] += before[m]
    for s in range(pool.slot_start.shape[0]):
        out.slot_start[s], out.slot_nodes[s] = before[pool.slot_start[s]], 0
    for g in range(pool.group_start.shape[0]):
        out.group_start[g] = before[pool.group_start[g]]
    for m in range(M):
        r = before[m]
        if before[m + 1] == r:
            continue
        out.token[r], out.slot[r], out.depth[r] = pool.token[m], slot[m], pool.depth[m]
        out.position[r], out.ancestors[r] = pool.position[m], pool.ancestors[m]
        out.cost[r], out.source[r] = pool.cost[m], pool.source[m]
        out.parent[r] = before[parent[m]] if parent[m] >= 0 else -1
        for n in range(pool.context.shape[1]):
            out.context[r, n] = pool.context[m, n]
        if slot[m] >= 0:
            out.slot_nodes[slot[m]] += 1


def prune(pool: Pool, rows: int, cost: torch.Tensor) -> Pool:
    """Pool of the `rows` cheapest rows by cost [M] int32; see `pool_builder.prune`."""
    if rows >= pool.rows:
        return pool
    require(on_host(cost, pool.token), "prune", cost, pool.token)
    S, G = pool.slot_start.shape[0], pool.group_start.shape[0] - 1
    out = empty_pool(rows, S, G, pool.context.shape[1], pool.token.device)
    _prune(rows, cost.numpy(), POOL.arrays(pool), POOL.arrays(out))
    return out
