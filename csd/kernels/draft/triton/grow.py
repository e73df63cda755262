"""Grow one slot's tree per program: the first two launches of `csd/kernels/draft/`.

The first launch grows FIRST_LEVELS levels. The second one cuts all slots' lists where the pool
would end if no more nodes came, and continues from nodes whose children may be cheaper than that:
no others could enter the pool, so the pool is the same as without the cut. A child costs at least
the cost of a level more than its parent.

A drafted node is one int64, by which nodes are sorted:

    cost << 41 | (depth - 1) << 37 | token << 6 | rank of its parent in the frontier << 3 | source

where the cost includes the slot's penalty. The slot's cheapest nodes of all levels so far are a
sorted list, into which each level's children are merged. The place of a node among the list's nodes
of its depth does not change, so it is its rank in its level's frontier: no link is stored.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from csd.kernels.draft import constants
from csd.kernels.draft.triton.fill import find_cut
from csd.kernels.draft.triton.mixture import (
    LAST_TOKEN,
    NONE,
    ONE,
    edge_cost,
    likeliest,
    load_frontier,
    look_up,
    masses,
    next_frontier,
)
from csd.kernels.draft.triton.slots import (
    by_place,
    level_cost,
    live_slots,
    ranks,
    slot_group_penalty,
    slot_progress_penalty,
)
from csd.kernels.table.triton.lookup import load_context, order_sizes
from csd.state import context_table, pool

PRIOR_KEY = tl.constexpr(context_table.PRIOR_KEY)
MAX_NODES = tl.constexpr(pool.MAX_NODES)
MAX_CHILDREN = tl.constexpr(pool.MAX_CHILDREN)
FIRST_LEVELS = tl.constexpr(constants.FIRST_LEVELS)


@triton.jit
def _one_a_thread(scratch_ptr, offsets, value, flat):
    """Returns the values as [C], one per thread, where before several threads hold the same.

    They are stored at `offsets` and loaded at `flat`.
    """
    tl.debug_barrier()
    tl.store(scratch_ptr + offsets, value)
    tl.debug_barrier()
    return tl.load(scratch_ptr + flat)


@triton.jit
def _as_nodes(
    child,  # [C] int64: q, token and source of MAX_CHILDREN children per node of the frontier
    cost,  # [F] int64, of the frontier
    depth,
    highest,
    stop_ids,  # [STOPS] int32, of the slot
    level,  # cost of a level
    STOPS: tl.constexpr,
):
    """[C] int64: the children as nodes; NONE if absent, an end token, or dearer than `highest`."""
    offs_c = tl.arange(0, child.shape[0])
    q, token = (child >> 34).to(tl.int32), child >> 3 & LAST_TOKEN
    some = q > 0
    for i in tl.static_range(STOPS):
        some = some & (token != tl.load(stop_ids + i))
    above = tl.gather(cost, offs_c // MAX_CHILDREN, 0)
    total = above + edge_cost(tl.where(some, q, ONE)) + level
    some = some & (total <= highest)
    node = (total << 41) | (depth.to(tl.int64) << 37) | (token << 6)
    node |= (offs_c // MAX_CHILDREN << 3) | (child & 7)
    return tl.where(some, node, NONE)


class GrowConstants(NamedTuple):
    """Constants of `grow_kernel`."""

    N: int
    BLOCK_N: int
    ORDERS: tuple[int, ...]  # longest first
    BLOCK_O: int
    HASH: tuple[int, ...]
    WAYS: int
    E: int
    BLOCK_E: int
    PRIOR_ORDERS: tuple[int, ...]  # longest first; empty without a prior
    PRIOR_N: int
    PRIOR_WAYS: int
    PRIOR_E: int
    SMOOTHING: tuple[float, float]  # of the groups' contexts, and of the prior's
    TRUST: tuple[float, float]
    OWN_WEIGHT: float
    BETAS: tuple[float, ...]  # of ORDERS, of PRIOR_ORDERS, and of the group as a whole
    UNCOUPLED: float
    LEVEL_COST: int
    SETTLE: int
    GROUP_PENALTY: int
    FRONTIER: int
    BLOCK_F: int
    STOPS: int
    BLOCK_S: int


NUMBERS = ["S", "rows", "max_drafted", "buckets", "prior_buckets", "max_depth", "max_cost"]


@triton.jit(do_not_specialize=NUMBERS)
def grow_kernel(
    slots,
    table,
    prior,  # the prior's table, or the groups' again without one
    seen_ptr,  # [S, MAX_NODES] int64: the first launch's nodes
    nodes_ptr,  # [S, MAX_NODES] int64, out: a live slot's nodes in order, then NONE
    front_ptr,  # [S, BLOCK_F, BLOCK_N] int32: contexts of the frontier that the first launch leaves
    children_ptr,  # [S, CHILDREN] int64, scratch for a level's children
    S,
    rows,
    max_drafted,  # most drafted nodes of all slots
    buckets,
    prior_buckets,  # of a part
    max_depth,
    max_cost,  # largest cost of a path
    C: tl.constexpr,
    RESUMED: tl.constexpr,  # True in the second launch
):
    BLOCK_F: tl.constexpr = C.BLOCK_F
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_O: tl.constexpr = C.BLOCK_O
    ORDERS: tl.constexpr = C.ORDERS
    PRIOR_ORDERS: tl.constexpr = C.PRIOR_ORDERS
    slot = tl.program_id(0)
    if tl.load(slots.live + slot) == 0:
        return
    # nodes beyond this place of the list cannot enter the pool
    room = tl.minimum(max_drafted, rows - live_slots(slots, S, C.BLOCK_S))
    width = tl.minimum(MAX_NODES - 1, room)
    generated = tl.load(slots.generated + slot)
    max_depth = tl.minimum(max_depth, tl.load(slots.max_new + slot) - 1 - generated)
    key, sample = tl.load(slots.key + slot), tl.load(slots.sample + slot)
    sampled = tl.load(slots.temperature + slot) > 0
    of_slot = tl.load(slots.group + slot)
    group_key = tl.load(slots.group_key + of_slot)
    # first entry of the group's part of the prior
    first = tl.load(slots.prior_part + of_slot).to(tl.int64) * prior_buckets * C.PRIOR_WAYS
    # longest first, then the prior's, then the group as a whole: the successors of ANY
    PRIOR_FIRST: tl.constexpr = len(ORDERS)
    PRIOR_END: tl.constexpr = PRIOR_FIRST + len(PRIOR_ORDERS)
    offs_o = tl.arange(0, BLOCK_O)
    whole = offs_o == PRIOR_END
    size = tl.where(whole, 1, order_sizes(ORDERS, BLOCK_O))

    offs_f = tl.arange(0, BLOCK_F)
    offs_p = tl.arange(0, MAX_NODES)
    CHILDREN: tl.constexpr = BLOCK_F * MAX_CHILDREN
    offs_c = tl.arange(0, CHILDREN)
    # [BLOCK_F, MAX_CHILDREN]
    offs_k = offs_f[:, None] * MAX_CHILDREN + tl.arange(0, MAX_CHILDREN)[None, :]
    scratch_ptr = children_ptr + slot * CHILDREN
    group = tl.zeros([BLOCK_F], tl.int64) + group_key
    group_penalty = slot_group_penalty(slots, slot, S, C.GROUP_PENALTY, C.BLOCK_S)
    first_cost = slot_progress_penalty(slots, slot, S, C.BLOCK_S)
    first_cost = tl.maximum(first_cost, group_penalty).to(tl.int64)
    level = level_cost(slots, slot, C.LEVEL_COST, C.SETTLE)
    highest = max_cost + first_cost
    # [BLOCK_F, BLOCK_N]
    front_ptr += (slot * BLOCK_F + offs_f[:, None]) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if RESUMED:
        cut, _ = find_cut(seen_ptr, slots, S, room, C.BLOCK_S)
        highest = tl.minimum(highest, cut.to(tl.int64))
        # [MAX_NODES]
        nodes = tl.load(seen_ptr + slot * MAX_NODES + offs_p)
        context = tl.load(front_ptr)
        front, cost = load_frontier(nodes, FIRST_LEVELS, width, level, highest, C.FRONTIER, BLOCK_F)
        depth = tl.full((), FIRST_LEVELS, tl.int32)
    else:
        nodes = tl.full([MAX_NODES], NONE, tl.int64)
        context = load_context(slots.context, slot + 0 * offs_f, offs_f < BLOCK_F, C.N, BLOCK_N)
        # the root, in every row
        front = tl.where(width > 0, 1, 0)
        cost = tl.zeros([BLOCK_F], tl.int64) + first_cost
        depth = tl.zeros((), tl.int32)
        max_depth = tl.minimum(max_depth, FIRST_LEVELS)
    while (depth < max_depth) & (front > 0):
        # [BLOCK_F, BLOCK_O], [BLOCK_F, BLOCK_O, BLOCK_E]
        total, token, weight, by_self, source = look_up(
            context, group, front, size, whole, sample, table, 0, buckets, C.WAYS, C.N, C.E, C
        )
        if PRIOR_FIRST < PRIOR_END:
            nobody = 0 * group + PRIOR_KEY
            prior_size = order_sizes(PRIOR_ORDERS, BLOCK_O, PRIOR_FIRST)
            other_total, other_token, other_weight, _by_self, _source = look_up(
                context,
                nobody,
                front,
                prior_size,
                offs_o < 0,
                sample,
                prior,
                first,
                prior_buckets,
                C.PRIOR_WAYS,
                C.PRIOR_N,
                C.PRIOR_E,
                C,
            )
            # an order is in one of the tables, and absent in the other
            total, token = total + other_total, tl.maximum(token, other_token)
            weight += other_weight
        position = generated + depth
        mass = masses(total, token, weight, by_self, key, sample, position, sampled, C)
        # [BLOCK_F, MAX_CHILDREN]
        token, q, source = likeliest(token, mass, source, PRIOR_FIRST, PRIOR_END)
        child = (q.to(tl.int64) << 34) | (token.to(tl.int64) & LAST_TOKEN) << 3 | source
        # [CHILDREN]
        child = _one_a_thread(scratch_ptr, offs_k, child, offs_c)
        stop_ids = slots.stop_ids + slot * C.STOPS
        child = _as_nodes(child, cost, depth, highest, stop_ids, level, C.STOPS)
        child = _one_a_thread(scratch_ptr, offs_c, child, offs_c)
        # [MAX_NODES]: the cheapest of the list and the children
        rank, child_place, node_place = ranks(nodes, child)
        nodes = by_place(child_place, child, MAX_NODES) + by_place(node_place, nodes, MAX_NODES)
        nodes = tl.where(offs_p < width, nodes, NONE)
        front, cost, context = next_frontier(
            nodes, child, rank, context, width, level, highest, C.FRONTIER
        )
        depth += 1
    tl.store(nodes_ptr + slot * MAX_NODES + offs_p, nodes)
    if not RESUMED:
        tl.store(front_ptr, context)
