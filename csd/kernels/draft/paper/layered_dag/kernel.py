"""Make every slot's list of nodes from its candidates: the kernel before that of the pool.

The formulas are in `csd/kernels/draft/paper/layered_dag/`. A list has the form that
`csd/kernels/draft/triton/fill.py` takes: nodes as sorted words of cost, depth, token, the parent's
rank in its level, and source.
"""

import triton
import triton.language as tl

from csd.kernels.draft.paper.layered_dag import constants
from csd.kernels.draft.triton.grow import MAX_CHILDREN, MAX_NODES
from csd.kernels.draft.triton.mixture import LAST_TOKEN, NONE, ONE, edge_cost
from csd.kernels.draft.triton.slots import by_place, live_slots, ranks, slot_progress_penalty
from csd.state import pool

SHIFT = tl.constexpr(constants.SHIFT)
SIBLING = tl.constexpr(pool.SIBLING)


@triton.jit
def _edges(
    token,  # [P] int32, of the layer, -1 where a candidate has ended
    chance,  # [P] int32
    through,  # [P]: candidates that pass through the node and continue
    same,  # [P, P]: whether two candidates have the same token here
    offs_p,
    SHARE: tl.constexpr,
    CHANCE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """[MAX_CHILDREN] int64: weight and token of the node's KEPT heaviest edges, 0 after them."""
    # along axis 0, the candidates that take the same edge as each candidate
    both = same & through[:, None] & through[None, :]
    count = tl.sum(both.to(tl.int32), 0).to(tl.int64)
    mass = tl.sum(tl.where(both, chance[:, None], 0), 0).to(tl.int64)
    total = tl.sum(through.to(tl.int32), 0).to(tl.int64)
    # the first candidate of each edge stands for the edge
    earlier = tl.sum((both & (offs_p[:, None] < offs_p[None, :])).to(tl.int32), 0)
    stands = through & (earlier == 0)
    # a 64-bit division branches; in float64 this quotient of 2^48 and 2^16 at most is as exact
    weight = SHARE * mass * total + ((CHANCE - SHARE) * CHANCE) * count * count
    weight = weight.to(tl.float64) / tl.maximum(count * total, 1).to(tl.float64)
    weight = weight.to(tl.int64) >> SHIFT
    weight = tl.where(stands, tl.minimum(weight, ONE), 0).to(tl.int32)
    offs_k = tl.arange(0, MAX_CHILDREN)
    edge = tl.zeros([MAX_CHILDREN], tl.int64)
    for k in tl.static_range(KEPT):
        most = tl.max(weight, 0)
        who = tl.min(tl.where(stands & (weight == most), token, LAST_TOKEN), 0)
        found = (most.to(tl.int64) << 34) | (who.to(tl.int64) << 3) | SIBLING
        edge = tl.where(offs_k == k, tl.where(most > 0, found, 0), edge)
        weight = tl.where(token == who, 0, weight)
    return edge


@triton.jit(do_not_specialize=["slots", "rows", "most", "max_cost"])
def _layer_kernel(
    live_ptr,  # [S] bool
    generated_ptr,  # [S] int32
    progress_penalty_ptr,  # [S] int32
    max_new_ptr,  # [S] int32
    stop_ids_ptr,  # [S, STOPS] int32
    token_ptr,  # [S, P, L] int32
    chance_ptr,  # [S, P, L] int32
    nodes_ptr,  # [S, MAX_NODES] int64, out: a live slot's nodes in order, then NONE
    children_ptr,  # [S, CHILDREN] int64, scratch for a level's children
    slots,
    rows,
    most,  # most drafted nodes of all slots
    max_cost,  # largest cost of a path
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    L: tl.constexpr,
    SHARE: tl.constexpr,
    CHANCE: tl.constexpr,
    FRONTIER: tl.constexpr,
    BLOCK_F: tl.constexpr,
    KEPT: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    slot = tl.program_id(0)
    if tl.load(live_ptr + slot) == 0:
        return
    # nodes beyond this place of the list cannot enter the pool
    room = tl.minimum(most, rows - live_slots(live_ptr, slots, BLOCK_S))
    width = tl.minimum(MAX_NODES - 1, room)
    max_depth = tl.minimum(L, tl.load(max_new_ptr + slot) - 1 - tl.load(generated_ptr + slot))
    offs_f, offs_p, offs_n = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_P), tl.arange(0, MAX_NODES)
    CHILDREN: tl.constexpr = BLOCK_F * MAX_CHILDREN
    offs_c, offs_k = tl.arange(0, CHILDREN), tl.arange(0, MAX_CHILDREN)
    scratch_ptr = children_ptr + slot * CHILDREN
    first_cost = slot_progress_penalty(
        live_ptr, generated_ptr, progress_penalty_ptr, slot, slots, BLOCK_S
    ).to(tl.int64)
    # [BLOCK_F]: the frontier; at first the root
    cost = tl.zeros([BLOCK_F], tl.int64) + first_cost
    last = tl.zeros([BLOCK_F], tl.int32)
    front = tl.where(width > 0, 1, 0)
    # [MAX_NODES]
    nodes = tl.full([MAX_NODES], NONE, tl.int64)
    depth = tl.zeros((), tl.int32)
    while (depth < max_depth) & (front > 0):
        # [BLOCK_P]
        at = (slot.to(tl.int64) * P + offs_p) * L + depth
        token = tl.load(token_ptr + at, mask=offs_p < P, other=-1)
        chance = tl.load(chance_ptr + at, mask=offs_p < P, other=0)
        before = tl.load(token_ptr + at - 1, mask=(offs_p < P) & (depth > 0), other=-1)
        same = token[:, None] == token[None, :]
        tl.debug_barrier()
        for f in range(0, front):
            through = tl.sum(tl.where(offs_f == f, last, 0), 0)
            through = (token >= 0) & ((depth == 0) | (before == through))
            edge = _edges(token, chance, through, same, offs_p, SHARE, CHANCE, KEPT)
            tl.store(scratch_ptr + f * MAX_CHILDREN + offs_k, edge)
        tl.debug_barrier()
        # [CHILDREN]
        child = tl.load(scratch_ptr + offs_c, mask=offs_c < front * MAX_CHILDREN, other=0)
        q, token = (child >> 34).to(tl.int32), child >> 3 & LAST_TOKEN
        some = q > 0
        for i in tl.static_range(STOPS):
            some = some & (token != tl.load(stop_ids_ptr + slot * STOPS + i))
        above = tl.gather(cost, offs_c // MAX_CHILDREN, 0)
        total = above + edge_cost(tl.where(some, q, ONE))
        some = some & (total <= max_cost + first_cost)
        node = (total << 41) | (depth.to(tl.int64) << 37) | (token << 6)
        node |= (offs_c // MAX_CHILDREN << 3) | SIBLING
        child = tl.where(some, node, NONE)

        # [MAX_NODES]: the cheapest of the list and the children
        rank, place, node_place = ranks(nodes, child)
        nodes = by_place(place, child, MAX_NODES) + by_place(node_place, nodes, MAX_NODES)
        nodes = tl.where(offs_n < width, nodes, NONE)

        # the next frontier: this level's cheapest nodes that are in the list
        last_node = tl.max(tl.where(nodes < NONE, nodes, -1), 0)
        # [BLOCK_F]
        chosen = by_place(rank, child, BLOCK_F)
        ahead = (chosen <= last_node) & (offs_f < FRONTIER)
        front = tl.sum(ahead.to(tl.int32), 0)
        chosen = tl.where(ahead, chosen, 0)
        cost = chosen >> 41
        last = ((chosen >> 6) & LAST_TOKEN).to(tl.int32)
        depth += 1
    tl.store(nodes_ptr + slot * MAX_NODES + offs_n, nodes)
