"""Cost at which all slots' lists of nodes are cut, and the rows that each slot gets."""

import triton
import triton.language as tl

from csd.kernels.draft_tree import constants
from csd.kernels.draft_tree.mixture import NONE
from csd.state import pool

MAX_NODES = tl.constexpr(pool.MAX_NODES)
# a list has less than MAX_NODES nodes
HALVINGS = tl.constexpr(pool.MAX_NODES.bit_length() - 1)
# the cut is found four bits per round: the number of rounds, and the step of the first one
WIDE = tl.constexpr(16)
ROUNDS_OF_CUT = tl.constexpr(-(-constants.MAX_COST.bit_length() // 4))
WIDE_STEP = tl.constexpr(16 ** (-(-constants.MAX_COST.bit_length() // 4) - 1))
MAX_COST = tl.constexpr(constants.MAX_COST)


@triton.jit
def _load_costs(nodes_ptr, live_ptr, start, slots, BLOCK_S: tl.constexpr):
    """[BLOCK_S, MAX_NODES] int32: costs of the slots' nodes, from slot `start` on; -1: no node."""
    offs_s = start + tl.arange(0, BLOCK_S)
    live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
    at = nodes_ptr + offs_s[:, None] * MAX_NODES + tl.arange(0, MAX_NODES)[None, :]
    node = tl.load(at, mask=live[:, None], other=NONE)
    return tl.where(node < NONE, node >> 41, -1).to(tl.int32)


@triton.jit
def _all_cheaper(nodes_ptr, live_ptr, slots, BLOCK_S: tl.constexpr):
    """Number of nodes of all slots that cost less than MAX_COST; leaves the lists in the cache."""
    below = tl.zeros([BLOCK_S, MAX_NODES], tl.int32)
    for start in range(0, slots, BLOCK_S):
        costs = _load_costs(nodes_ptr, live_ptr, start, slots, BLOCK_S)
        below += ((costs >= 0) & (costs < MAX_COST)).to(tl.int32)
    return tl.sum(below)


@triton.jit
def _cheaper(nodes_ptr, live_ptr, cost, slots, BLOCK_S: tl.constexpr):
    """[W]: number of nodes of all slots that cost less than cost [W], by bisection of the lists."""
    counts = tl.zeros([BLOCK_S, cost.shape[0]], tl.int32)
    for start in range(0, slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
        place = tl.zeros([BLOCK_S, cost.shape[0]], tl.int32)
        for i in tl.static_range(HALVINGS):
            at = nodes_ptr + offs_s[:, None] * MAX_NODES + place + ((MAX_NODES // 2 >> i) - 1)
            # entries after a list's end count as MAX_COST: no `cost` to compare with is larger
            node = tl.load(at, mask=live[:, None], other=NONE)
            place += tl.where((node >> 41).to(tl.int32) < cost[None, :], MAX_NODES // 2 >> i, 0)
        counts += place
    return tl.sum(counts, 0)


@triton.jit
def find_cut(nodes_ptr, live_ptr, slots, budget, BLOCK_S: tl.constexpr):
    """Largest cost below which there are at most `budget` nodes, and the number of nodes below."""
    cut = tl.full((), MAX_COST, tl.int32)
    below = _all_cheaper(nodes_ptr, live_ptr, slots, BLOCK_S)
    if below > budget:
        cut = tl.zeros((), tl.int32)
        offs_w = tl.arange(0, WIDE)
        step = tl.full((), WIDE_STEP, tl.int32)
        for _ in range(0, ROUNDS_OF_CUT):
            counts = _cheaper(nodes_ptr, live_ptr, cut + offs_w * step, slots, BLOCK_S)
            # counts are ascending; the first is within the budget
            fits = tl.sum((counts <= budget).to(tl.int32), 0) - 1
            below = tl.sum(tl.where(offs_w == fits, counts, 0), 0)
            cut += fits * step
            step = step // WIDE
    return cut, below


@triton.jit
def share_rows(nodes_ptr, live_ptr, group_ptr, me, group, cut, left, slots, BLOCK_S: tl.constexpr):
    """Slot `me`'s first row and number of rows, the rows of groups before `me`, and all rows.

    Nodes that cost exactly the cut fill the `left` remaining rows, those of the first slots first.
    """
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
    return first, my_rows, group_start, total
