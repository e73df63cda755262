"""Classes of slots with equal text, and their trees, in compiled loops; see `reference.py`."""

import numpy as np
import torch

from csd.kernels.draft.constants import POOL
from csd.kernels.draft.cpu.grow import COST, DEPTH, PARENT, SLOT, SOURCE, TOKEN, cheapest
from csd.kernels.draft.cpu.pools import fill, root_positions
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import require
from csd.kernels.texts.reference import NOT_DRAFTED
from csd.state.pool import COST_ONE, Pool, Texts
from csd.state.pool_builder import allocate_pool, live_by_group
from csd.state.record import View, on_host
from csd.state.slots import Slots
from csd.state.verdict import Verdict

SLOTS = View(Slots, reads="live", writes="leader")
PATHS = View(Verdict, "sample accept_row accept_count")


@loop
def _firsts(live, leader, first):
    """Write the first live slot of each live slot's class to first [S], -1 for others."""
    S = live.shape[0]
    for s in range(S):
        first[s] = -1
        if not live[s]:
            continue
        for t in range(s + 1):
            if live[t] and leader[t] == leader[s]:
                first[s] = t
                break


@loop
def _part(slots, verdict):
    live, leader = slots.live, slots.leader
    sample, row, count = verdict.sample, verdict.accept_row, verdict.accept_count
    S = live.shape[0]
    old = leader.copy()
    for s in range(S):
        if not live[s]:
            continue
        for t in range(s + 1):
            if not live[t] or old[t] != old[s] or count[t] != count[s]:
                continue
            same = True
            for i in range(count[s]):
                same &= sample[row[t, i]] == sample[row[s, i]]
            if same:
                leader[s] = t
                break


def part(slots: Slots, verdict: Verdict) -> None:
    """`part_ref`."""
    require(on_host(slots.live, verdict.sample), "part", slots.live, verdict.sample)
    _part(SLOTS.arrays(slots), PATHS.arrays(verdict))


def representatives(slots: Slots) -> torch.Tensor:
    """`csd.kernels.texts.reference.representatives`."""
    first = torch.empty(slots.count, dtype=torch.int64)
    _firsts(slots.live.numpy(), slots.leader.numpy(), first.numpy())
    return first


@loop
def _child(token, child, after, above, wanted):
    """Node below `above` whose token is `wanted`, or -1; child and after list the nodes below."""
    node = child[above]
    while node >= 0 and token[node, TOKEN] != wanted:
        node = after[node]
    return node


@loop
def _merge(first, leaders, pool):
    """Returns nodes [n, 6] and contexts [n, N] of the class trees, roots first, and the order of
    the nodes that are not roots, cheapest first."""
    M, S, L, N = pool.token.shape[0], first.shape[0], leaders.shape[0], pool.context.shape[1]
    node, context = np.empty((L + M, 6), np.int64), np.empty((L + M, N), np.int32)
    mass, members = np.zeros(L + M), np.zeros(L + M, np.int64)
    child, after = np.full(L + M, -1, np.int64), np.full(L + M, -1, np.int64)
    root, node_of = np.full(S, -1, np.int64), np.empty(M, np.int64)
    for i in range(L):
        root[leaders[i]] = i
    count = L
    for m in range(M):
        s = pool.slot[m]
        if s < 0:
            continue
        leader, parent = first[s], pool.parent[m]
        above = node_of[parent] if parent >= 0 else -1
        at = root[leader]
        if above >= 0:
            at = _child(node, child, after, above, pool.token[m])
            if at < 0:
                at = count
                child[at], after[at], child[above] = -1, child[above], at
                count += 1
        node_of[m] = at
        if members[at] == 0:
            node[at, COST], node[at, TOKEN], node[at, SLOT] = pool.cost[m], pool.token[m], leader
            node[at, DEPTH], node[at, PARENT] = pool.depth[m], above
            node[at, SOURCE] = pool.source[m]
            for n in range(N):
                context[at, n] = pool.context[m, n]
        members[at] += 1
        mass[at] += 2.0 ** (-float(pool.cost[m]) / COST_ONE)
    for i in range(L, count):
        if members[i] > 1:
            node[i, COST] = np.int64(np.floor(-np.log2(mass[i]) * COST_ONE + 0.5))
    return node, context, cheapest(node, L, count, S)


def merge(pool: Pool, slots: Slots) -> Pool:
    """`merge_ref`."""
    require(on_host(slots.live, pool.token), "merge", slots.live, pool.token)
    first, order = representatives(slots).numpy(), live_by_group(slots)
    leaders, group = order[first[order] == order], slots.group.numpy()
    node, context, chosen = _merge(first, leaders, POOL.arrays(pool))
    out = allocate_pool(slots, leaders.size + chosen.size)
    zero = np.zeros(slots.count, np.int64)
    fill(leaders, chosen, node, context, zero, group, root_positions(slots), POOL.arrays(out))
    return out


@loop
def _spread(order, first, texts, pool, out, row):
    """Write copies of class trees for the slots in `order` [L], by group, and their rows."""
    M = 0
    for s in range(first.shape[0]):
        out.slot_start[s], out.slot_nodes[s] = 0, 0
    text_row = np.full(pool.token.shape[0], -1, np.int64)
    for s in order:
        leader = first[s]
        begin, nodes = texts.slot_start[leader], texts.slot_nodes[leader]
        out.slot_start[s], out.slot_nodes[s] = M, nodes
        for j in range(nodes):
            t, m = begin + j, M + j
            row[m] = t
            out.token[m], out.slot[m], out.depth[m] = texts.token[t], s, texts.depth[t]
            out.position[m], out.ancestors[m] = texts.position[t], texts.ancestors[t]
            out.source[m] = texts.source[t]
            out.parent[m] = texts.parent[t] - begin + M if texts.parent[t] >= 0 else -1
            out.cost[m] = -1 if j > 0 else 0
            for n in range(out.context.shape[1]):
                out.context[m, n] = texts.context[t, n]
        first_own, own = pool.slot_start[s], pool.slot_nodes[s]
        for m in range(first_own, first_own + own):
            at = begin
            if pool.parent[m] >= 0:
                above, at = text_row[pool.parent[m]], -1
                # a parent precedes its children
                for t in range(above + 1 if above >= 0 else begin + nodes, begin + nodes):
                    if texts.parent[t] == above and texts.token[t] == pool.token[m]:
                        at = t
                        break
            text_row[m] = at
            if at >= 0:
                out.cost[M + at - begin] = pool.cost[m]
        for m in range(M + 1, M + nodes):
            if out.cost[m] < 0:
                out.cost[m] = max(NOT_DRAFTED, out.cost[out.parent[m]])
        M += nodes


def spread(texts: Pool, pool: Pool, slots: Slots) -> Pool:
    """`spread_ref`."""
    require(on_host(slots.live, pool.token), "spread", slots.live, pool.token)
    first, order = representatives(slots).numpy(), live_by_group(slots)
    M = int(texts.slot_nodes.numpy()[first[order]].sum())
    out = allocate_pool(slots, M)
    row = torch.empty(M, dtype=torch.int32)
    _spread(order, first, POOL.arrays(texts), POOL.arrays(pool), POOL.arrays(out), row.numpy())
    # rows of the groups, whose slots follow one another
    ends = np.zeros(out.group_start.shape[0], np.int64)
    np.add.at(ends, slots.group.numpy()[order] + 1, out.slot_nodes.numpy()[order])
    out.group_start.copy_(torch.from_numpy(ends.cumsum()))
    out.texts = Texts(texts, row)
    return out
