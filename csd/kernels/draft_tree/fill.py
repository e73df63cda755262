"""Cut all slots' lists of nodes at one cost and fill the pool: the second kernel of a draft.

Every program finds the cut by itself, four bits per round, since that is cheaper than a launch.
Then program s writes the rows of slot s, and all programs write a part of the padding.
"""

import triton
import triton.language as tl

from csd.kernels.draft_tree.cut import find_cut, share_rows
from csd.kernels.draft_tree.mixture import LAST_TOKEN
from csd.kernels.draft_tree.slots import live_slots, slot_group_penalty, slot_progress_penalty
from csd.state import pool

MAX_NODES = tl.constexpr(pool.MAX_NODES)
# a word whose reach is doubled this many times has all ancestors
ROUNDS = tl.constexpr(pool.MAX_DEPTH.bit_length())


@triton.jit
def _store_rows(columns, row, mask, token, parent, slot, depth, position, ancestors, cost, source):
    """Writes the fields of the pool at rows [W]; columns: their pointers in this order."""
    token_ptr, parent_ptr, slot_ptr, depth_ptr = columns[:4]
    position_ptr, ancestors_ptr, cost_ptr, source_ptr = columns[4:]
    tl.store(token_ptr + row, token, mask=mask)
    tl.store(parent_ptr + row, parent, mask=mask)
    tl.store(slot_ptr + row, slot, mask=mask)
    tl.store(depth_ptr + row, depth, mask=mask)
    tl.store(position_ptr + row, position, mask=mask)
    tl.store(ancestors_ptr + row, ancestors, mask=mask)
    tl.store(cost_ptr + row, cost, mask=mask)
    tl.store(source_ptr + row, source, mask=mask)


@triton.jit
def _store_padding(columns, context_ptr, start, rows, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes padding to the rows from `start` on, MAX_NODES of them per iteration and program."""
    offs_n = tl.arange(0, BLOCK_N)
    for first in range(start, rows, tl.num_programs(0) * MAX_NODES):
        row = first + tl.arange(0, MAX_NODES)
        mask = row < rows
        zero = tl.zeros([MAX_NODES], tl.int32)
        none = zero - 1
        _store_rows(columns, row, mask, none, none, none, zero, zero, zero.to(tl.int64), zero, zero)
        at = row[:, None] * N + offs_n[None, :]
        absent = tl.full([MAX_NODES, BLOCK_N], -1, tl.int32)
        tl.store(context_ptr + at, absent, mask=mask[:, None] & (offs_n < N)[None, :])


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


@triton.jit(do_not_specialize=["slots", "groups", "rows", "most"])
def _fill_kernel(
    nodes_ptr,  # [S, MAX_NODES] int64
    live_ptr,  # [S] bool
    group_ptr,  # [S] int32
    generated_ptr,  # [S] int32
    step_ptr,  # [S] int32
    progress_penalty_ptr,  # [S] int32
    temperature_ptr,  # [S] float64
    slot_context_ptr,  # [S, N] int32
    prompt_len_ptr,  # [G] int32
    token_ptr,  # [M] int32, out
    parent_ptr,  # [M] int32, out
    slot_ptr,  # [M] int32, out
    depth_ptr,  # [M] int32, out
    position_ptr,  # [M] int32, out
    ancestors_ptr,  # [M] int64, out
    cost_ptr,  # [M] int32, out
    source_ptr,  # [M] int32, out
    context_ptr,  # [M, N] int32, out
    slot_start_ptr,  # [S] int32, out
    slot_nodes_ptr,  # [S] int32, out
    group_start_ptr,  # [G + 1] int32, out
    slots,
    groups,
    rows,
    most,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_PENALTY: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    me = tl.program_id(0)
    mine = me < slots
    live = tl.load(live_ptr + me, mask=mine, other=0) != 0
    group = tl.load(group_ptr + me, mask=live, other=-1)
    budget = tl.minimum(most, rows - live_slots(live_ptr, slots, BLOCK_S))
    cut, below = find_cut(nodes_ptr, live_ptr, slots, budget, BLOCK_S)
    first, my_rows, group_start, total = share_rows(
        nodes_ptr, live_ptr, group_ptr, me, group, cut, budget - below, slots, BLOCK_S
    )
    tl.store(group_start_ptr + me, group_start, mask=me <= groups)
    first = tl.where(live, first, 0)
    tl.store(slot_start_ptr + me, first, mask=mine)
    tl.store(slot_nodes_ptr + me, my_rows, mask=mine)
    columns = (
        token_ptr, parent_ptr, slot_ptr, depth_ptr, position_ptr, ancestors_ptr, cost_ptr,
        source_ptr,
    )  # fmt: skip
    _store_padding(columns, context_ptr, total + me * MAX_NODES, rows, N, BLOCK_N)
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
    committed = tl.load(slot_context_ptr + me * N + offs_n, mask=offs_n < N, other=-1)
    last = tl.sum(tl.where(offs_n == 0, committed, 0), 0)
    token = tl.where(drafted, ((node >> 6) & LAST_TOKEN).to(tl.int32), last)
    up = _parents(node, depth, mask, drafted)
    word = _ancestor_words(up)
    base = tl.load(prompt_len_ptr + group) + tl.load(generated_ptr + me)
    group_penalty = slot_group_penalty(
        live_ptr,
        group_ptr,
        generated_ptr,
        step_ptr,
        temperature_ptr,
        me,
        slots,
        GROUP_PENALTY,
        BLOCK_S,
    )
    first_cost = slot_progress_penalty(
        live_ptr, generated_ptr, progress_penalty_ptr, me, slots, BLOCK_S
    )
    first_cost = tl.maximum(first_cost, group_penalty)
    cost = tl.where(drafted, (node >> 41).to(tl.int32) - first_cost, 0)
    parent = tl.where(drafted, first + up, -1)
    source = (node & 7).to(tl.int32)
    _store_rows(
        columns, row, mask, token, parent, me + 0 * i, depth, base + depth, word, cost, source
    )
    # a context: the node's own token, its ancestors' tokens, then the slot's
    at = i
    for n in range(0, N):
        past = tl.gather(committed, tl.maximum(n - depth, 0), 0)
        at_n = tl.where(n < depth, tl.gather(token, at, 0), past)
        tl.store(context_ptr + row * N + n, at_n, mask=mask)
        at = tl.gather(up, at, 0)
