"""Look up the contexts of a level's frontier in the graph, and select the next frontier."""

import triton
import triton.language as tl

from csd.kernels.draft_tree.mixture import LAST_TOKEN, NONE
from csd.kernels.draft_tree.nodes import by_place
from csd.kernels.graph_lookup import cut_context, hash_tokens, holds_context, probe_entries
from csd.state import context_table as table
from csd.state import pool

OWN, SIBLING = tl.constexpr(pool.OWN), tl.constexpr(pool.SIBLING)
PROMPT = tl.constexpr(pool.PROMPT)
SAMPLE_BITS = tl.constexpr(table.SAMPLE_BITS)
ANY = tl.constexpr(table.ANY)
PROMPT_BIT = tl.constexpr(table.PROMPT_BIT)
SAMPLES = tl.constexpr((1 << table.PROMPT_BIT) - 1)


@triton.jit
def look_up(
    context,  # [F, BLOCK_N] int32
    group,  # [F] int64
    front,  # number of contexts
    size,  # [O] int32, tokens of each order; 0 if it is not looked up
    whole,  # [O] bool: the order that stands for the context of the group as a whole
    sample,
    entries,  # pointers of the table
    buckets,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Looks up each context; returns total, token, weight, by_self and source.

    total: [F, O], 0 if absent. The others: [F, O, BLOCK_E], of the successors; token is -1 and
    weight 0 if absent, by_self is true if the sample itself has observed the successor.
    """
    entry_group_ptr, entry_hash_ptr, entry_tokens_ptr, entry_total_ptr = entries[:4]
    succ_token_ptr, succ_weight_ptr, succ_source_ptr = entries[4:]
    offs_e = tl.arange(0, BLOCK_E)[None, None, :]
    tokens = cut_context(context, size)
    any_token = whole[None, :, None] & (tl.arange(0, context.shape[1]) == 0)[None, None, :]
    tokens = tl.where(any_token, ANY, tokens)
    code = hash_tokens(tokens, group, size, HASH)
    mask = (tl.arange(0, context.shape[0]) < front)[:, None] & (size > 0)[None, :]
    entry, found = probe_entries(code, mask, entry_hash_ptr, buckets, WAYS)
    # all of an entry is loaded before its key is compared, so that the loads overlap
    at = entry[:, :, None] * E + offs_e
    held = found[:, :, None] & (offs_e < E)
    token = tl.load(succ_token_ptr + at, mask=held, other=-1)
    weight = tl.load(succ_weight_ptr + at, mask=held, other=0)
    bits = tl.load(succ_source_ptr + at, mask=held, other=0)
    total = tl.load(entry_total_ptr + entry, mask=found, other=0)
    found = holds_context(entry, found, group, tokens, entry_group_ptr, entry_tokens_ptr, N)
    token = tl.where(found[:, :, None], token, -1)
    weight = tl.where(token >= 0, weight, 0)
    total = tl.where(found, total, 0)
    by_self = ((bits >> (sample % SAMPLE_BITS).to(tl.int64)) & 1) == 1
    by_sample = (bits & SAMPLES) != 0
    by_prompt = ((bits >> PROMPT_BIT) & 1) == 1
    # two bits hold four sources: HISTORY is 0 until `likeliest`
    source = tl.where(by_sample, SIBLING, tl.where(by_prompt, PROMPT, 0))
    source = tl.where(by_self, OWN, source)
    return total, token, weight, by_self, source


@triton.jit
def _expanded(nodes, chosen, width, level, highest, FRONTIER: tl.constexpr):
    """Flags [F] of the children that are expanded, among a level's cheapest, `chosen` (or NONE).

    Expanded are those in the list `nodes` of `width` places whose own children may enter the list
    and cost no more than `highest`.
    """
    last_node = tl.max(tl.where(nodes < NONE, nodes, -1), 0)
    # cost at the list's last place; above all costs if that is empty
    end = tl.min(tl.where(tl.arange(0, nodes.shape[0]) == width - 1, nodes, NONE), 0) >> 41
    ahead = (chosen <= last_node) & (tl.arange(0, chosen.shape[0]) < FRONTIER)
    return ahead & ((chosen >> 41) + level <= tl.minimum(end, highest))


@triton.jit
def load_frontier(
    nodes, depth, width, level, highest, FRONTIER: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Number and costs [BLOCK_F] of the nodes of this depth in the list `nodes` to be expanded."""
    there = (nodes < NONE) & ((nodes >> 37 & 15) == depth - 1)
    rank = tl.cumsum(there.to(tl.int32), 0) - 1
    chosen = by_place(tl.where(there, rank, -1), nodes, BLOCK_F)
    chosen = tl.where(tl.arange(0, BLOCK_F) < tl.sum(there.to(tl.int32), 0), chosen, NONE)
    ahead = _expanded(nodes, chosen, width, level, highest, FRONTIER)
    return tl.sum(ahead.to(tl.int32), 0), tl.where(ahead, chosen, 0) >> 41


@triton.jit
def next_frontier(nodes, child, rank, context, width, level, highest, FRONTIER: tl.constexpr):
    """Number, costs [F] and contexts [F, BLOCK_N] of the children that form the next frontier."""
    F: tl.constexpr = context.shape[0]
    offs_f = tl.arange(0, F)
    offs_n = tl.arange(0, context.shape[1])
    # [F]
    chosen = by_place(rank, child, F)
    ahead = _expanded(nodes, chosen, width, level, highest, FRONTIER)
    front = tl.sum(ahead.to(tl.int32), 0)
    chosen = tl.where(ahead, chosen, 0)
    parent = ((chosen >> 3) & 7).to(tl.int32)
    # [F, F, BLOCK_N], then [F, BLOCK_N, BLOCK_N]
    mine = parent[:, None, None] == offs_f[None, :, None]
    context = tl.sum(tl.where(mine, context[None, :, :], 0), 1)
    before = offs_n[None, :, None] == offs_n[None, None, :] + 1
    context = tl.sum(tl.where(before, context[:, None, :], 0), 2)
    last = ((chosen >> 6) & LAST_TOKEN).to(tl.int32)
    context = tl.where(offs_n[None, :] == 0, last[:, None], context)
    return front, chosen >> 41, context
