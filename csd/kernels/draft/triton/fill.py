"""Cut all slots' lists of nodes at one cost and fill the pool: the last kernel of a draft.

Every program finds the cut and the rows that its slot gets by itself, since that is cheaper than a
launch; the cut takes a round for four bits. Then program s writes the rows of slot s, and all
programs write a part of the padding.
"""

import triton
import triton.language as tl

from csd.kernels.draft import constants
from csd.kernels.draft.triton.mixture import LAST_TOKEN, NONE
from csd.kernels.draft.triton.slots import live_slots, slot_group_penalty, slot_progress_penalty
from csd.state import pool

MAX_NODES = tl.constexpr(pool.MAX_NODES)
# a list has less than MAX_NODES nodes
HALVINGS = tl.constexpr(pool.MAX_NODES.bit_length() - 1)
# the cut is found four bits per round: the number of rounds, and the step of the first one
WIDE = tl.constexpr(16)
ROUNDS_OF_CUT = tl.constexpr(-(-constants.MAX_COST.bit_length() // 4))
WIDE_STEP = tl.constexpr(16 ** (-(-constants.MAX_COST.bit_length() // 4) - 1))
MAX_COST = tl.constexpr(constants.MAX_COST)
# a word whose reach is doubled this many times has all ancestors
ROUNDS = tl.constexpr(pool.MAX_DEPTH.bit_length())


@triton.jit
def _load_costs(nodes_ptr, slots, start, S, BLOCK_S: tl.constexpr):
    """[BLOCK_S, MAX_NODES] int32: costs of the slots' nodes, from slot `start` on; -1: no node."""
    offs_s = start + tl.arange(0, BLOCK_S)
    live = tl.load(slots.live + offs_s, mask=offs_s < S, other=0) != 0
    ptrs = nodes_ptr + offs_s[:, None] * MAX_NODES + tl.arange(0, MAX_NODES)[None, :]
    node = tl.load(ptrs, mask=live[:, None], other=NONE)
    return tl.where(node < NONE, node >> 41, -1).to(tl.int32)


@triton.jit
def _all_cheaper(nodes_ptr, slots, S, BLOCK_S: tl.constexpr):
    """Number of nodes of all slots that cost less than MAX_COST; leaves the lists in the cache."""
    below = tl.zeros([BLOCK_S, MAX_NODES], tl.int32)
    for start in range(0, S, BLOCK_S):
        costs = _load_costs(nodes_ptr, slots, start, S, BLOCK_S)
        below += ((costs >= 0) & (costs < MAX_COST)).to(tl.int32)
    return tl.sum(below)


@triton.jit
def _cheaper(nodes_ptr, slots, cost, S, BLOCK_S: tl.constexpr):
    """[W]: number of nodes of all slots that cost less than cost [W], by bisection of the lists."""
    counts = tl.zeros([BLOCK_S, cost.shape[0]], tl.int32)
    for start in range(0, S, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live = tl.load(slots.live + offs_s, mask=offs_s < S, other=0) != 0
        rank = tl.zeros([BLOCK_S, cost.shape[0]], tl.int32)
        for i in tl.static_range(HALVINGS):
            ptrs = nodes_ptr + offs_s[:, None] * MAX_NODES + rank + ((MAX_NODES // 2 >> i) - 1)
            # entries after a list's end count as MAX_COST: no `cost` to compare with is larger
            node = tl.load(ptrs, mask=live[:, None], other=NONE)
            rank += tl.where((node >> 41).to(tl.int32) < cost[None, :], MAX_NODES // 2 >> i, 0)
        counts += rank
    return tl.sum(counts, 0)


@triton.jit
def find_cut(nodes_ptr, slots, S, budget, BLOCK_S: tl.constexpr):
    """Largest cost below which there are at most `budget` nodes, and the number of nodes below."""
    cut = tl.full((), MAX_COST, tl.int32)
    below = _all_cheaper(nodes_ptr, slots, S, BLOCK_S)
    if below > budget:
        cut = tl.zeros((), tl.int32)
        offs_w = tl.arange(0, WIDE)
        step = tl.full((), WIDE_STEP, tl.int32)
        for _ in range(0, ROUNDS_OF_CUT):
            counts = _cheaper(nodes_ptr, slots, cut + offs_w * step, S, BLOCK_S)
            # counts are ascending; the first is within the budget
            fits = tl.sum((counts <= budget).to(tl.int32), 0) - 1
            below = tl.sum(tl.where(offs_w == fits, counts, 0), 0)
            cut += fits * step
            step = step // WIDE
    return cut, below


@triton.jit
def share_rows(nodes_ptr, slots, me, group, cut, left, S, BLOCK_S: tl.constexpr):
    """Slot `me`'s first row and number of rows, the rows of groups before `me`, and all rows.

    Nodes that cost exactly the cut fill the `left` remaining rows, those of the first slots first.
    """
    first = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.int32)
    my_rows = tl.zeros((), tl.int32)
    group_start = tl.zeros((), tl.int32)
    for start in range(0, S, BLOCK_S):
        # [BLOCK_S]
        offs_s = start + tl.arange(0, BLOCK_S)
        costs = _load_costs(nodes_ptr, slots, start, S, BLOCK_S)
        fewer = tl.sum(((costs >= 0) & (costs < cut)).to(tl.int32), 1)
        equal = tl.sum((costs == cut).to(tl.int32), 1)
        before = tl.cumsum(equal, 0) - equal
        taken = tl.minimum(tl.maximum(left - before, 0), equal)
        left -= tl.sum(equal, 0)
        other_live = tl.load(slots.live + offs_s, mask=offs_s < S, other=0) != 0
        other_group = tl.load(slots.group + offs_s, mask=other_live, other=-1)
        own = tl.where(other_live, 1 + fewer + taken, 0)
        ahead = (other_group < group) | ((other_group == group) & (offs_s < me))
        first += tl.sum(tl.where(ahead, own, 0), 0)
        my_rows += tl.sum(tl.where(offs_s == me, own, 0), 0)
        group_start += tl.sum(tl.where(other_group < me, own, 0), 0)
        total += tl.sum(own, 0)
    return first, my_rows, group_start, total


@triton.jit
def _store_rows(pool, row, mask, token, parent, slot, depth, position, ancestors, cost, source):
    """Writes these fields of the pool at rows [W]."""
    tl.store(pool.token + row, token, mask=mask)
    tl.store(pool.parent + row, parent, mask=mask)
    tl.store(pool.slot + row, slot, mask=mask)
    tl.store(pool.depth + row, depth, mask=mask)
    tl.store(pool.position + row, position, mask=mask)
    tl.store(pool.ancestors + row, ancestors, mask=mask)
    tl.store(pool.cost + row, cost, mask=mask)
    tl.store(pool.source + row, source, mask=mask)


@triton.jit
def _store_padding(pool, start, rows, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes padding to the rows from `start` on, MAX_NODES of them per iteration and program."""
    offs_n = tl.arange(0, BLOCK_N)
    for first in range(start, rows, tl.num_programs(0) * MAX_NODES):
        row = first + tl.arange(0, MAX_NODES)
        mask = row < rows
        zero = tl.zeros([MAX_NODES], tl.int32)
        none = zero - 1
        _store_rows(pool, row, mask, none, none, none, zero, zero, zero.to(tl.int64), zero, zero)
        offsets = row[:, None] * N + offs_n[None, :]
        absent = tl.full([MAX_NODES, BLOCK_N], -1, tl.int32)
        tl.store(pool.context + offsets, absent, mask=mask[:, None] & (offs_n < N)[None, :])


@triton.jit
def _parents(node, depth, mask, drafted):
    """[MAX_NODES]: index of each row's parent among the slot's rows, from its rank in its depth."""
    i = tl.arange(0, MAX_NODES)
    parent_rank = ((node >> 3) & 7).to(tl.int32)
    # [MAX_NODES, MAX_NODES]: nodes j along axis 0, i along axis 1
    j_depth = tl.where(mask, depth, -1)[:, None]
    rank = tl.sum(((j_depth == depth[None, :]) & (i[:, None] < i[None, :])).to(tl.int32), 0)
    above = (j_depth == depth[None, :] - 1) & (rank[:, None] == parent_rank[None, :])
    return tl.where(drafted, tl.sum(tl.where(above, i[:, None], 0), 0), 0)


@triton.jit
def _ancestor_words(parent):
    """[MAX_NODES] int64: a bit for each row above a row, and for itself."""
    word = tl.full([MAX_NODES], 1, tl.int64) << tl.arange(0, MAX_NODES).to(tl.int64)
    # `jump` is the parent, then the ancestor twice as far above in each round
    jump = parent
    for _ in range(0, ROUNDS):
        word |= tl.gather(word, jump, 0)
        jump = tl.gather(jump, jump, 0)
    return word


@triton.jit(do_not_specialize=["S", "G", "rows", "max_drafted"])
def fill_kernel(
    nodes_ptr,  # [S, MAX_NODES] int64
    slots,
    pool,  # out
    S,
    G,
    rows,
    max_drafted,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_PENALTY: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    me = tl.program_id(0)
    mine = me < S
    live = tl.load(slots.live + me, mask=mine, other=0) != 0
    group = tl.load(slots.group + me, mask=live, other=-1)
    budget = tl.minimum(max_drafted, rows - live_slots(slots, S, BLOCK_S))
    cut, below = find_cut(nodes_ptr, slots, S, budget, BLOCK_S)
    first, my_rows, group_start, total = share_rows(
        nodes_ptr, slots, me, group, cut, budget - below, S, BLOCK_S
    )
    tl.store(pool.group_start + me, group_start, mask=me <= G)
    first = tl.where(live, first, 0)
    tl.store(pool.slot_start + me, first, mask=mine)
    tl.store(pool.slot_nodes + me, my_rows, mask=mine)
    _store_padding(pool, total + me * MAX_NODES, rows, N, BLOCK_N)
    if live == 0:
        return

    # [MAX_NODES]: the slot's rows, the root first
    i = tl.arange(0, MAX_NODES)
    row = first + i
    mask = i < my_rows
    drafted = mask & (i > 0)
    node = tl.load(nodes_ptr + me * MAX_NODES + i - 1, mask=drafted, other=0)
    depth = tl.where(drafted, ((node >> 37) & 15) + 1, 0).to(tl.int32)
    # [BLOCK_N]
    offs_n = tl.arange(0, BLOCK_N)
    committed = tl.load(slots.context + me * N + offs_n, mask=offs_n < N, other=-1)
    last = tl.sum(tl.where(offs_n == 0, committed, 0), 0)
    token = tl.where(drafted, ((node >> 6) & LAST_TOKEN).to(tl.int32), last)
    up = _parents(node, depth, mask, drafted)
    word = _ancestor_words(up)
    base = tl.load(slots.prompt_len + group) + tl.load(slots.generated + me)
    group_penalty = slot_group_penalty(slots, me, S, GROUP_PENALTY, BLOCK_S)
    first_cost = tl.maximum(slot_progress_penalty(slots, me, S, BLOCK_S), group_penalty)
    cost = tl.where(drafted, (node >> 41).to(tl.int32) - first_cost, 0)
    parent = tl.where(drafted, first + up, -1)
    source = (node & 7).to(tl.int32)
    _store_rows(pool, row, mask, token, parent, me + 0 * i, depth, base + depth, word, cost, source)
    # a context: the node's own token, its ancestors' tokens, then the slot's
    index = i
    for n in range(0, N):
        past = tl.gather(committed, tl.maximum(n - depth, 0), 0)
        at_n = tl.where(n < depth, tl.gather(token, index, 0), past)
        tl.store(pool.context + row * N + n, at_n, mask=mask)
        index = tl.gather(up, index, 0)
