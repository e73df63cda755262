"""Triton kernels of the source paper's drafts: candidates of suffix matches, then their layers."""

from typing import NamedTuple

import triton
import triton.language as tl

from csd.kernels.draft import constants
from csd.kernels.draft.triton.grow import MAX_CHILDREN, MAX_NODES
from csd.kernels.draft.triton.mixture import LAST_TOKEN, NONE, ONE, edge_cost
from csd.kernels.draft.triton.slots import by_place, live_slots, ranks, slot_progress_penalty
from csd.state import pool

LAYER_SHIFT = tl.constexpr(constants.LAYER_SHIFT)
SIBLING = tl.constexpr(pool.SIBLING)


# larger than every distance, and small enough that distances fit 32 bits
FAR = tl.constexpr(1 << 20)


@triton.jit
def _searched(slot, row, slots, texts, C: tl.constexpr):
    """End of the row's places where a window for the slot may end; 0 if there are none."""
    live = tl.load(slots.live + slot) != 0
    group = tl.load(slots.group + slot, mask=live, other=0)
    key = tl.load(slots.group_key + tl.maximum(group, 0))
    other = tl.load(texts.sample + row) != tl.load(slots.sample + slot)
    # a sample without k tokens has no query
    oldest = tl.load(slots.context + slot * C.N + C.K - 1)
    some = live & (tl.load(texts.group_key + row) == key) & other & (oldest >= 0)
    return tl.where(some, tl.load(texts.length + row) - 1, 0)


@triton.jit
def _cell(
    above,
    row,
    window,
    last,
    far,
    I: tl.constexpr,
    B: tl.constexpr,
    K: tl.constexpr,
    EDITS: tl.constexpr,
):
    """Cell (I, J) of the table; above: the band of row I - 1; row: the band of row I so far."""
    J: tl.constexpr = I + B - EDITS
    if J < 0 or J > K:
        best = far
    elif J == 0:
        best = far * 0 + I
    else:
        best = tl.where(window[J - 1] == last, above[B], above[B] + 1)
        # the last tokens are aligned with each other, so they are neither deleted nor inserted
        if not (I == K and J == K):
            if B < 2 * EDITS:
                best = tl.minimum(best, above[B + 1] + 1)
            if B > 0:
                best = tl.minimum(best, row[B - 1] + 1)
    return best


@triton.jit
def _distance(
    text_ptr,  # tokens of the row
    query_ptr,  # the slot's context, latest first
    ends,  # [BLOCK_T]
    inside,  # [BLOCK_T]
    K: tl.constexpr,
    EDITS: tl.constexpr,
):
    """[BLOCK_T] int32: D of the query and the windows that end at `ends`; above EDITS: no match.

    Element b of a band is the table's cell (i, i + b - EDITS); cells outside the table are FAR.
    """
    BAND: tl.constexpr = 2 * EDITS + 1
    far = tl.zeros_like(ends) + FAR
    window = ()
    whole = inside
    for j in tl.static_range(K):
        index = ends - (K - 1 - j)
        token = tl.load(text_ptr + index, mask=inside & (index >= 0), other=-1)
        whole = whole & (token >= 0)
        # Triton does not support unpacking a tuple into another
        window = window + (token,)  # noqa: RUF005
    if EDITS == 0:
        for i in tl.static_range(K):
            whole = whole & (window[i] == tl.load(query_ptr + (K - 1 - i)))
        return tl.where(whole, 0, far)
    band = ()
    for b in tl.static_range(BAND):
        band = band + (tl.where(b >= EDITS, far * 0 + (b - EDITS), far),)  # noqa: RUF005
    for i in tl.static_range(1, K + 1):
        # a context has the latest token first
        last = tl.load(query_ptr + (K - i))
        row = ()
        for b in tl.static_range(BAND):
            cell = _cell(band, row, window, last, far, i, b, K, EDITS)
            row = row + (cell,)  # noqa: RUF005
        band = row
    return tl.where(whole, band[EDITS], far)


class TextSearch(NamedTuple):
    """Constants of the search in texts."""

    N: int
    K: int
    EDITS: int
    LEVELS: int
    BLOCK_T: int


@triton.jit(do_not_specialize=["text_rows", "width"])
def count_kernel(
    slots,
    texts,
    counts_ptr,  # [S, LEVELS, R] int32, out
    text_rows,
    width,
    C: tl.constexpr,
):
    BLOCK_T: tl.constexpr = C.BLOCK_T
    LEVELS: tl.constexpr = C.LEVELS
    slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    end = _searched(slot, row, slots, texts, C)
    level = tl.arange(0, LEVELS)
    count = tl.zeros([LEVELS], tl.int32)
    for start in range(C.K - 1, end, BLOCK_T):
        ends = start + tl.arange(0, BLOCK_T)
        distance = _distance(
            texts.token + row * width, slots.context + slot * C.N, ends, ends < end, C.K, C.EDITS
        )
        hit = (distance[:, None] == level[None, :]) & (level <= C.EDITS)[None, :]
        count += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts_ptr + (slot * LEVELS + level) * text_rows + row, count)


@triton.jit(do_not_specialize=["text_rows", "width"])
def take_kernel(
    slots,
    texts,
    counts_ptr,  # [S, LEVELS, R] int32
    out,
    text_rows,
    width,
    C: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    BLOCK_T: tl.constexpr = C.BLOCK_T
    LEVELS: tl.constexpr = C.LEVELS
    slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    level, offs_l = tl.arange(0, LEVELS), tl.arange(0, BLOCK_L)
    own = tl.load(counts_ptr + (slot * LEVELS + level) * text_rows + row)
    # the program of row 0 also writes the places that no match fills
    if (tl.sum(own, 0) == 0) & (row > 0):
        return
    # [LEVELS]: matches of the slot, and those in earlier rows
    total, before = tl.zeros([LEVELS], tl.int32), tl.zeros([LEVELS], tl.int32)
    for start in range(0, text_rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        counts = counts_ptr + (slot * LEVELS + level)[:, None] * text_rows + r[None, :]
        count = tl.load(counts, mask=(r < text_rows)[None, :], other=0)
        total += tl.sum(count, 1)
        before += tl.sum(tl.where((r < row)[None, :], count, 0), 1)
    # smaller distances first
    rank = tl.cumsum(total, 0) - total + before
    place = slot * P
    if row == 0:
        offs_p = tl.arange(0, BLOCK_P)
        none = (offs_p >= tl.sum(total, 0)) & (offs_p < P)
        counts = (place + offs_p)[:, None] * L + offs_l[None, :]
        mask = none[:, None] & (offs_l < L)[None, :]
        absent = tl.zeros([BLOCK_P, BLOCK_L], tl.int32)
        tl.store(out.token + counts, absent - 1, mask=mask)
        tl.store(out.chance + counts, absent, mask=mask)
    length = tl.load(texts.length + row)
    end = tl.where(tl.sum(own, 0) > 0, length - 1, 0)
    for start in range(C.K - 1, end, BLOCK_T):
        ends = start + tl.arange(0, BLOCK_T)
        distance = _distance(
            texts.token + row * width, slots.context + slot * C.N, ends, ends < end, C.K, C.EDITS
        )
        # [BLOCK_T]; one scan per distance, because Triton 3.6 compiles no scan over few columns
        to = tl.zeros([BLOCK_T], tl.int32)
        for near in tl.static_range(C.EDITS + 1):
            hit = (distance == near).to(tl.int32)
            first = tl.sum(tl.where(level == near, rank, 0), 0)
            to += hit * (first + tl.cumsum(hit, 0) - 1)
            rank += tl.where(level == near, tl.sum(hit, 0), 0)
        taken = (distance <= C.EDITS) & (to < P)
        # [BLOCK_T, BLOCK_L]
        source = ends[:, None] + 1 + offs_l[None, :]
        written = taken[:, None] & (offs_l < L)[None, :]
        read = written & (source < length)
        token = tl.load(texts.token + row * width + source, mask=read, other=-1)
        chance = tl.load(texts.chance + row * width + source, mask=read, other=0)
        counts = (place + to)[:, None] * L + offs_l[None, :]
        tl.store(out.token + counts, token, mask=written)
        tl.store(out.chance + counts, chance, mask=written)


@triton.jit
def _edges(
    token,  # [P] int32, of the layer, -1 where a candidate has ended
    chance,  # [P] int32
    through,  # [P]: candidates that pass through the node and continue
    same,  # [P, P]: whether two candidates have the same token here
    offs_p,
    C: tl.constexpr,
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
    weight = C.SHARE * mass * total + ((C.CHANCE - C.SHARE) * C.CHANCE) * count * count
    weight = weight.to(tl.float64) / tl.maximum(count * total, 1).to(tl.float64)
    weight = weight.to(tl.int64) >> LAYER_SHIFT
    weight = tl.where(stands, tl.minimum(weight, ONE), 0).to(tl.int32)
    offs_k = tl.arange(0, MAX_CHILDREN)
    edge = tl.zeros([MAX_CHILDREN], tl.int64)
    KEPT: tl.constexpr = C.KEPT
    for k in tl.static_range(KEPT):
        heaviest = tl.max(weight, 0)
        who = tl.min(tl.where(stands & (weight == heaviest), token, LAST_TOKEN), 0)
        packed = (heaviest.to(tl.int64) << 34) | (who.to(tl.int64) << 3) | SIBLING
        edge = tl.where(offs_k == k, tl.where(heaviest > 0, packed, 0), edge)
        weight = tl.where(token == who, 0, weight)
    return edge


class DagLayers(NamedTuple):
    """Constants of `layered_dag_kernel`."""

    P: int
    BLOCK_P: int
    L: int
    SHARE: int
    CHANCE: int
    FRONTIER: int
    BLOCK_F: int
    KEPT: int
    STOPS: int
    BLOCK_S: int


@triton.jit(do_not_specialize=["S", "rows", "max_drafted", "max_cost"])
def layered_dag_kernel(
    slots,
    candidates,
    nodes_ptr,  # [S, MAX_NODES] int64, out: a live slot's nodes in order, then NONE
    children_ptr,  # [S, CHILDREN] int64, scratch for a level's children
    S,
    rows,
    max_drafted,  # most drafted nodes of all slots
    max_cost,  # largest cost of a path
    C: tl.constexpr,
):
    BLOCK_F: tl.constexpr = C.BLOCK_F
    BLOCK_P: tl.constexpr = C.BLOCK_P
    BLOCK_S: tl.constexpr = C.BLOCK_S
    STOPS: tl.constexpr = C.STOPS
    slot = tl.program_id(0)
    if tl.load(slots.live + slot) == 0:
        return
    # nodes beyond this place of the list cannot enter the pool
    room = tl.minimum(max_drafted, rows - live_slots(slots, S, BLOCK_S))
    width = tl.minimum(MAX_NODES - 1, room)
    max_depth = tl.minimum(C.L, tl.load(slots.max_new + slot) - 1 - tl.load(slots.generated + slot))
    offs_f, offs_p, offs_n = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_P), tl.arange(0, MAX_NODES)
    CHILDREN: tl.constexpr = BLOCK_F * MAX_CHILDREN
    offs_c, offs_k = tl.arange(0, CHILDREN), tl.arange(0, MAX_CHILDREN)
    scratch_ptr = children_ptr + slot * CHILDREN
    first_cost = slot_progress_penalty(slots, slot, S, BLOCK_S).to(tl.int64)
    # [BLOCK_F]: the frontier; at first the root
    cost = tl.zeros([BLOCK_F], tl.int64) + first_cost
    last = tl.zeros([BLOCK_F], tl.int32)
    front = tl.where(width > 0, 1, 0)
    # [MAX_NODES]
    nodes = tl.full([MAX_NODES], NONE, tl.int64)
    depth = tl.zeros((), tl.int32)
    while (depth < max_depth) & (front > 0):
        # [BLOCK_P]
        index = (slot.to(tl.int64) * C.P + offs_p) * C.L + depth
        token = tl.load(candidates.token + index, mask=offs_p < C.P, other=-1)
        chance = tl.load(candidates.chance + index, mask=offs_p < C.P, other=0)
        before = tl.load(candidates.token + index - 1, mask=(offs_p < C.P) & (depth > 0), other=-1)
        same = token[:, None] == token[None, :]
        tl.debug_barrier()
        for f in range(0, front):
            through = tl.sum(tl.where(offs_f == f, last, 0), 0)
            through = (token >= 0) & ((depth == 0) | (before == through))
            edge = _edges(token, chance, through, same, offs_p, C)
            tl.store(scratch_ptr + f * MAX_CHILDREN + offs_k, edge)
        tl.debug_barrier()
        # [CHILDREN]
        child = tl.load(scratch_ptr + offs_c, mask=offs_c < front * MAX_CHILDREN, other=0)
        q, token = (child >> 34).to(tl.int32), child >> 3 & LAST_TOKEN
        some = q > 0
        for i in tl.static_range(STOPS):
            some = some & (token != tl.load(slots.stop_ids + slot * STOPS + i))
        above = tl.gather(cost, offs_c // MAX_CHILDREN, 0)
        total = above + edge_cost(tl.where(some, q, ONE))
        some = some & (total <= max_cost + first_cost)
        node = (total << 41) | (depth.to(tl.int64) << 37) | (token << 6)
        node |= (offs_c // MAX_CHILDREN << 3) | SIBLING
        child = tl.where(some, node, NONE)

        # [MAX_NODES]: the cheapest of the list and the children
        rank, child_place, node_place = ranks(nodes, child)
        nodes = by_place(child_place, child, MAX_NODES) + by_place(node_place, nodes, MAX_NODES)
        nodes = tl.where(offs_n < width, nodes, NONE)

        # the next frontier: this level's cheapest nodes that are in the list
        last_node = tl.max(tl.where(nodes < NONE, nodes, -1), 0)
        # [BLOCK_F]
        chosen = by_place(rank, child, BLOCK_F)
        ahead = (chosen <= last_node) & (offs_f < C.FRONTIER)
        front = tl.sum(ahead.to(tl.int32), 0)
        chosen = tl.where(ahead, chosen, 0)
        cost = chosen >> 41
        last = ((chosen >> 6) & LAST_TOKEN).to(tl.int32)
        depth += 1
    tl.store(nodes_ptr + slot * MAX_NODES + offs_n, nodes)
