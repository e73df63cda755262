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
    stop_ids_ptr,  # [STOPS] int32, of the slot
    level,  # cost of a level
    STOPS: tl.constexpr,
):
    """[C] int64: the children as nodes; NONE if absent, an end token, or dearer than `highest`."""
    offs_c = tl.arange(0, child.shape[0])
    q, token = (child >> 34).to(tl.int32), child >> 3 & LAST_TOKEN
    some = q > 0
    for i in tl.static_range(STOPS):
        some = some & (token != tl.load(stop_ids_ptr + i))
    above = tl.gather(cost, offs_c // MAX_CHILDREN, 0)
    total = above + edge_cost(tl.where(some, q, ONE)) + level
    some = some & (total <= highest)
    node = (total << 41) | (depth.to(tl.int64) << 37) | (token << 6)
    node |= (offs_c // MAX_CHILDREN << 3) | (child & 7)
    return tl.where(some, node, NONE)


@triton.jit(
    do_not_specialize=[
        "slots",
        "rows",
        "max_drafted",
        "buckets",
        "prior_buckets",
        "max_depth",
        "max_cost",
    ]
)
def _grow_kernel(
    live_ptr,  # [S] bool
    group_ptr,  # [S] int32
    key_ptr,  # [S] int64
    sample_ptr,  # [S] int32
    generated_ptr,  # [S] int32
    step_ptr,  # [S] int32
    progress_penalty_ptr,  # [S] int32
    max_new_ptr,  # [S] int32
    temperature_ptr,  # [S] float64
    context_ptr,  # [S, N] int32
    stop_ids_ptr,  # [S, STOPS] int32
    group_key_ptr,  # [G] int64
    prior_part_ptr,  # [G] int32
    entry_group_ptr,  # [C] int64
    entry_hash_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    entry_total_ptr,  # [C] int32
    succ_token_ptr,  # [C, E] int32
    succ_weight_ptr,  # [C, E] int32
    succ_source_ptr,  # [C, E] int64
    prior_group_ptr,  # the prior's table, or the groups' again without one
    prior_hash_ptr,
    prior_tokens_ptr,
    prior_total_ptr,
    prior_token_ptr,
    prior_weight_ptr,
    prior_source_ptr,
    seen_ptr,  # [S, MAX_NODES] int64: the first launch's nodes
    nodes_ptr,  # [S, MAX_NODES] int64, out: a live slot's nodes in order, then NONE
    front_ptr,  # [S, BLOCK_F, BLOCK_N] int32: contexts of the frontier that the first launch leaves
    children_ptr,  # [S, CHILDREN] int64, scratch for a level's children
    slots,
    rows,
    max_drafted,  # most drafted nodes of all slots
    buckets,
    prior_buckets,  # of a part
    max_depth,
    max_cost,  # largest cost of a path
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERS: tl.constexpr,  # longest first
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PRIOR_ORDERS: tl.constexpr,  # longest first; empty without a prior
    PRIOR_N: tl.constexpr,
    PRIOR_WAYS: tl.constexpr,
    PRIOR_E: tl.constexpr,
    SMOOTHING: tl.constexpr,
    TRUST: tl.constexpr,
    OWN_WEIGHT: tl.constexpr,
    BETAS: tl.constexpr,  # of ORDERS, of PRIOR_ORDERS, and of the group as a whole
    UNCOUPLED: tl.constexpr,
    LEVEL_COST: tl.constexpr,
    SETTLE: tl.constexpr,
    GROUP_PENALTY: tl.constexpr,
    FRONTIER: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    RESUMED: tl.constexpr,  # True in the second launch
):
    slot = tl.program_id(0)
    if tl.load(live_ptr + slot) == 0:
        return
    # nodes beyond this place of the list cannot enter the pool
    room = tl.minimum(max_drafted, rows - live_slots(live_ptr, slots, BLOCK_S))
    width = tl.minimum(MAX_NODES - 1, room)
    generated = tl.load(generated_ptr + slot)
    max_depth = tl.minimum(max_depth, tl.load(max_new_ptr + slot) - 1 - generated)
    key, sample = tl.load(key_ptr + slot), tl.load(sample_ptr + slot)
    sampled = tl.load(temperature_ptr + slot) > 0
    of_slot = tl.load(group_ptr + slot)
    group_key = tl.load(group_key_ptr + of_slot)
    # first entry of the group's part of the prior
    first = tl.load(prior_part_ptr + of_slot).to(tl.int64) * prior_buckets * PRIOR_WAYS
    # longest first, then the prior's, then the group as a whole: the successors of ANY
    PRIOR_FIRST: tl.constexpr = len(ORDERS)
    PRIOR_END: tl.constexpr = PRIOR_FIRST + len(PRIOR_ORDERS)
    CONTEXTS: tl.constexpr = PRIOR_END + 1
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
    entries = (
        entry_group_ptr,
        entry_hash_ptr,
        entry_tokens_ptr,
        entry_total_ptr,
        succ_token_ptr,
        succ_weight_ptr,
        succ_source_ptr,
    )
    prior = (
        prior_group_ptr + first,
        prior_hash_ptr + first,
        prior_tokens_ptr + first * PRIOR_N,
        prior_total_ptr + first,
        prior_token_ptr + first * PRIOR_E,
        prior_weight_ptr + first * PRIOR_E,
        prior_source_ptr + first * PRIOR_E,
    )
    group = tl.zeros([BLOCK_F], tl.int64) + group_key
    fields = (live_ptr, group_ptr, generated_ptr, step_ptr, temperature_ptr)
    group_penalty = slot_group_penalty(fields, slot, slots, GROUP_PENALTY, BLOCK_S)
    first_cost = slot_progress_penalty(
        live_ptr, generated_ptr, progress_penalty_ptr, slot, slots, BLOCK_S
    )
    first_cost = tl.maximum(first_cost, group_penalty).to(tl.int64)
    level = level_cost(generated_ptr, step_ptr, slot, LEVEL_COST, SETTLE)
    highest = max_cost + first_cost
    # [BLOCK_F, BLOCK_N]
    front_ptr += (slot * BLOCK_F + offs_f[:, None]) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if RESUMED:
        cut, _ = find_cut(seen_ptr, live_ptr, slots, room, BLOCK_S)
        highest = tl.minimum(highest, cut.to(tl.int64))
        # [MAX_NODES]
        nodes = tl.load(seen_ptr + slot * MAX_NODES + offs_p)
        context = tl.load(front_ptr)
        front, cost = load_frontier(nodes, FIRST_LEVELS, width, level, highest, FRONTIER, BLOCK_F)
        depth = tl.full((), FIRST_LEVELS, tl.int32)
    else:
        nodes = tl.full([MAX_NODES], NONE, tl.int64)
        context = load_context(context_ptr, slot + 0 * offs_f, offs_f < BLOCK_F, N, BLOCK_N)
        # the root, in every row
        front = tl.where(width > 0, 1, 0)
        cost = tl.zeros([BLOCK_F], tl.int64) + first_cost
        depth = tl.zeros((), tl.int32)
        max_depth = tl.minimum(max_depth, FIRST_LEVELS)
    while (depth < max_depth) & (front > 0):
        # [BLOCK_F, BLOCK_O], [BLOCK_F, BLOCK_O, BLOCK_E]
        total, token, weight, by_self, source = look_up(
            context, group, front, size, whole, sample, entries, buckets, HASH, WAYS, N, E, BLOCK_E
        )
        if PRIOR_FIRST < PRIOR_END:
            other_total, other_token, other_weight, _by_self, _source = look_up(
                context,
                0 * group + PRIOR_KEY,
                front,
                order_sizes(PRIOR_ORDERS, BLOCK_O, PRIOR_FIRST),
                offs_o < 0,
                sample,
                prior,
                prior_buckets,
                HASH,
                PRIOR_WAYS,
                PRIOR_N,
                PRIOR_E,
                BLOCK_E,
            )
            # an order is in one of the tables, and absent in the other
            total, token = total + other_total, tl.maximum(token, other_token)
            weight += other_weight
        mass = masses(
            total,
            token,
            weight,
            by_self,
            key,
            sample,
            generated + depth,
            sampled,
            CONTEXTS,
            PRIOR_FIRST,
            PRIOR_END,
            SMOOTHING,
            TRUST,
            OWN_WEIGHT,
            BETAS,
            UNCOUPLED,
        )
        # [BLOCK_F, MAX_CHILDREN]
        token, q, source = likeliest(token, mass, source, PRIOR_FIRST, PRIOR_END)
        child = (q.to(tl.int64) << 34) | (token.to(tl.int64) & LAST_TOKEN) << 3 | source
        # [CHILDREN]
        child = _one_a_thread(scratch_ptr, offs_k, child, offs_c)
        child = _as_nodes(
            child,
            cost,
            depth,
            highest,
            stop_ids_ptr + slot * STOPS,
            level,
            STOPS,
        )
        child = _one_a_thread(scratch_ptr, offs_c, child, offs_c)
        # [MAX_NODES]: the cheapest of the list and the children
        rank, child_place, node_place = ranks(nodes, child)
        nodes = by_place(child_place, child, MAX_NODES) + by_place(node_place, nodes, MAX_NODES)
        nodes = tl.where(offs_p < width, nodes, NONE)
        front, cost, context = next_frontier(
            nodes, child, rank, context, width, level, highest, FRONTIER
        )
        depth += 1
    tl.store(nodes_ptr + slot * MAX_NODES + offs_p, nodes)
    if not RESUMED:
        tl.store(front_ptr, context)
