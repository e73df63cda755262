"""Cut all slots' lists of nodes at one cost and fill the pool: the second kernel of a draft.

Every program finds the cut by itself, four bits at a time, since that is cheaper than a launch.
Then program s writes the rows of slot s, and all of them the padding.
"""

import triton
import triton.language as tl

from csd import pool
from csd.kernels import draft_tree_ref
from csd.kernels.draft_grow_kernel import LAST_TOKEN, MAX_NODES, NONE, head_start, live_slots

# a word that doubles its reach so often holds all ancestors
ROUNDS = tl.constexpr(pool.MAX_DEPTH.bit_length())
# a list has less than MAX_NODES nodes
HALVINGS = tl.constexpr(pool.MAX_NODES.bit_length() - 1)
# the cut is found four bits at a time: so many rounds, and the first one's step
WIDE = tl.constexpr(16)
ROUNDS_OF_CUT = tl.constexpr(-(-draft_tree_ref.MAX_COST.bit_length() // 4))
WIDE_STEP = tl.constexpr(16 ** (-(-draft_tree_ref.MAX_COST.bit_length() // 4) - 1))
MAX_COST = tl.constexpr(draft_tree_ref.MAX_COST)


@triton.jit
def _load_costs(nodes_ptr, live_ptr, start, slots, BLOCK_S: tl.constexpr):
    """[BLOCK_S, MAX_NODES] int32 of slots from `start` on, -1 where there is no node."""
    offs_s = start + tl.arange(0, BLOCK_S)
    live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
    at = nodes_ptr + offs_s[:, None] * MAX_NODES + tl.arange(0, MAX_NODES)[None, :]
    node = tl.load(at, mask=live[:, None], other=NONE)
    return tl.where(node < NONE, node >> 41, -1).to(tl.int32)


@triton.jit
def _all_cheaper(nodes_ptr, live_ptr, slots, BLOCK_S: tl.constexpr):
    """How many nodes of all slots cost less than MAX_COST; the lists are near afterwards."""
    below = tl.zeros([BLOCK_S, MAX_NODES], tl.int32)
    for start in range(0, slots, BLOCK_S):
        costs = _load_costs(nodes_ptr, live_ptr, start, slots, BLOCK_S)
        below += ((costs >= 0) & (costs < MAX_COST)).to(tl.int32)
    return tl.sum(below)


@triton.jit
def _cheaper(nodes_ptr, live_ptr, cost, slots, BLOCK_S: tl.constexpr):
    """[W]: how many nodes of all slots cost less than each of cost [W]; lists are sorted."""
    counts = tl.zeros([BLOCK_S, cost.shape[0]], tl.int32)
    for start in range(0, slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
        place = tl.zeros([BLOCK_S, cost.shape[0]], tl.int32)
        for i in tl.static_range(HALVINGS):
            at = nodes_ptr + offs_s[:, None] * MAX_NODES + place + ((MAX_NODES // 2 >> i) - 1)
            # what is behind a list counts as MAX_COST, as no `cost` to be told from it is higher
            node = tl.load(at, mask=live[:, None], other=NONE)
            place += tl.where((node >> 41).to(tl.int32) < cost[None, :], MAX_NODES // 2 >> i, 0)
        counts += place
    return tl.sum(counts, 0)


@triton.jit(do_not_specialize=["slots", "groups", "rows", "most"])
def _fill_kernel(
    nodes_ptr,  # [S, MAX_NODES] int64
    live_ptr,  # [S] bool
    group_ptr,  # [S] int32
    generated_ptr,  # [S] int32
    pace_ptr,  # [S] int32
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
    BLOCK_S: tl.constexpr,
):
    me = tl.program_id(0)
    mine = me < slots
    live = tl.load(live_ptr + me, mask=mine, other=0) != 0
    group = tl.load(group_ptr + me, mask=live, other=-1)
    budget = tl.minimum(most, rows - live_slots(live_ptr, slots, BLOCK_S))
    # the largest cost that no more nodes than the budget stay below
    cut = tl.full((), MAX_COST, tl.int32)
    below = _all_cheaper(nodes_ptr, live_ptr, slots, BLOCK_S)
    if below > budget:
        cut = tl.zeros((), tl.int32)
        offs_w = tl.arange(0, WIDE)
        step = tl.full((), WIDE_STEP, tl.int32)
        for _ in range(0, ROUNDS_OF_CUT):
            counts = _cheaper(nodes_ptr, live_ptr, cut + offs_w * step, slots, BLOCK_S)
            # counts rise; the first is within the budget
            fits = tl.sum((counts <= budget).to(tl.int32), 0) - 1
            below = tl.sum(tl.where(offs_w == fits, counts, 0), 0)
            cut += fits * step
            step = step // WIDE

    # of nodes that cost just this, those of the first slots fill what is left
    left = budget - below
    first = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.int32)
    my_rows = tl.zeros((), tl.int32)
    group_start = tl.zeros((), tl.int32)
    for start in range(0, slots, BLOCK_S):
        # [BLOCK_S]
        offs_s = start + tl.arange(0, BLOCK_S)
        costs = _load_costs(nodes_ptr, live_ptr, start, slots, BLOCK_S)
        fewer = tl.sum(((costs >= 0) & (costs < cut)).to(tl.int32), 1)
        equal = tl.sum((costs == cut).to(tl.int32), 1)
        before = tl.cumsum(equal, 0) - equal
        taken = tl.minimum(tl.maximum(left - before, 0), equal)
        left -= tl.sum(equal, 0)
        other_live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
        other_group = tl.load(group_ptr + offs_s, mask=other_live, other=-1)
        own = tl.where(other_live, 1 + fewer + taken, 0)
        ahead = (other_group < group) | ((other_group == group) & (offs_s < me))
        first += tl.sum(tl.where(ahead, own, 0), 0)
        my_rows += tl.sum(tl.where(offs_s == me, own, 0), 0)
        group_start += tl.sum(tl.where(other_group < me, own, 0), 0)
        total += tl.sum(own, 0)
    tl.store(group_start_ptr + me, group_start, mask=me <= groups)
    first = tl.where(live, first, 0)
    tl.store(slot_start_ptr + me, first, mask=mine)
    tl.store(slot_nodes_ptr + me, my_rows, mask=mine)

    # padding
    offs_n = tl.arange(0, BLOCK_N)
    for start in range(total + me * MAX_NODES, rows, tl.num_programs(0) * MAX_NODES):
        row = start + tl.arange(0, MAX_NODES)
        mask = row < rows
        zero = tl.zeros([MAX_NODES], tl.int32)
        tl.store(token_ptr + row, zero - 1, mask=mask)
        tl.store(parent_ptr + row, zero - 1, mask=mask)
        tl.store(slot_ptr + row, zero - 1, mask=mask)
        tl.store(depth_ptr + row, zero, mask=mask)
        tl.store(position_ptr + row, zero, mask=mask)
        tl.store(ancestors_ptr + row, zero.to(tl.int64), mask=mask)
        tl.store(cost_ptr + row, zero, mask=mask)
        tl.store(source_ptr + row, zero, mask=mask)
        at = row[:, None] * N + offs_n[None, :]
        absent = tl.full([MAX_NODES, BLOCK_N], -1, tl.int32)
        tl.store(context_ptr + at, absent, mask=mask[:, None] & (offs_n < N)[None, :])
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
    spoken = tl.load(slot_context_ptr + me * N + offs_n, mask=offs_n < N, other=-1)
    last = tl.sum(tl.where(offs_n == 0, spoken, 0), 0)
    token = tl.where(drafted, ((node >> 6) & LAST_TOKEN).to(tl.int32), last)
    parent_rank = ((node >> 2) & 15).to(tl.int32)
    # [MAX_NODES, MAX_NODES]: nodes j down, i across
    j_depth = tl.where(mask, depth, -1)[:, None]
    rank = tl.sum(((j_depth == depth[None, :]) & (i[:, None] < i[None, :])).to(tl.int32), 0)
    above = (j_depth == depth[None, :] - 1) & (rank[:, None] == parent_rank[None, :])
    up = tl.where(drafted, tl.sum(tl.where(above, i[:, None], 0), 0), 0)

    # what is above a node, then what is above that, ..
    word = tl.full([MAX_NODES], 1, tl.int64) << i.to(tl.int64)
    jump = up
    for _ in range(0, ROUNDS):
        word |= tl.gather(word, jump, 0)
        jump = tl.gather(jump, jump, 0)
    base = tl.load(prompt_len_ptr + group) + tl.load(generated_ptr + me)
    tl.store(token_ptr + row, token, mask=mask)
    tl.store(parent_ptr + row, tl.where(drafted, first + up, -1), mask=mask)
    tl.store(slot_ptr + row, me + 0 * i, mask=mask)
    tl.store(depth_ptr + row, depth, mask=mask)
    tl.store(position_ptr + row, base + depth, mask=mask)
    tl.store(ancestors_ptr + row, word, mask=mask)
    first_cost = head_start(live_ptr, generated_ptr, pace_ptr, me, slots, BLOCK_S)
    cost = tl.where(drafted, (node >> 41).to(tl.int32) - first_cost, 0)
    tl.store(cost_ptr + row, cost, mask=mask)
    tl.store(source_ptr + row, (node & 3).to(tl.int32), mask=mask)
    # a node's own token, its ancestors', the slot's
    at = i
    for n in range(0, N):
        past = tl.gather(spoken, tl.maximum(n - depth, 0), 0)
        told = tl.where(n < depth, tl.gather(token, at, 0), past)
        tl.store(context_ptr + row * N + n, told, mask=mask)
        at = tl.gather(up, at, 0)
