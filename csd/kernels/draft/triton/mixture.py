"""One level of a slot's tree: look up a frontier's contexts, estimate children, select the next.

Children are the likeliest tokens of a mixture of the contexts' successors (`csd/kernels/draft/`).
"""

import triton
import triton.language as tl

from csd.kernels.common import noise
from csd.kernels.common.triton import gumbel64, philox_word
from csd.kernels.draft import constants
from csd.kernels.draft.triton.slots import by_place
from csd.kernels.table.triton.lookup import (
    cut_context,
    hash_tokens,
    holds_context,
    probe_entries,
)
from csd.state import context_table as table
from csd.state import pool

MAX_CHILDREN = tl.constexpr(pool.MAX_CHILDREN)
ONE, UNIT = tl.constexpr(constants.ONE), tl.constexpr(constants.UNIT)
EULER_GAMMA, TAIL = tl.constexpr(constants.EULER_GAMMA), tl.constexpr(constants.TAIL)
SAMPLE = tl.constexpr(noise.SAMPLE)
OWN, SIBLING = tl.constexpr(pool.OWN), tl.constexpr(pool.SIBLING)
PROMPT = tl.constexpr(pool.PROMPT)
SAMPLE_BITS = tl.constexpr(table.SAMPLE_BITS)
ANY = tl.constexpr(table.ANY)
PROMPT_BIT = tl.constexpr(table.PROMPT_BIT)
SAMPLES = tl.constexpr((1 << table.PROMPT_BIT) - 1)
HISTORY, PRIOR = tl.constexpr(pool.HISTORY), tl.constexpr(pool.PRIOR)
LAST_TOKEN = tl.constexpr((1 << 31) - 1)
# doublings that reach all of a token's contexts: 16 orders and the group as a whole
SUM_ROUNDS = tl.constexpr(5)
# sorts after every node
NONE = tl.constexpr((1 << 63) - 1)


@triton.jit
def masses(
    total,  # [F, O] int32, longest order first, 0 where absent
    token,  # [F, O, E] int32, -1 where absent
    weight,  # [F, O, E] int32, 0 where absent
    by_self,  # [F, O, E]: whether the sample itself has had it after this context
    key,
    sample,
    position,
    sampled,
    C: tl.constexpr,
):
    """[F, O, E] int32: mass that each successor of each context adds to q of its token."""
    # the prior's contexts, and the number of all
    PRIOR_FIRST: tl.constexpr = len(C.ORDERS)
    PRIOR_END: tl.constexpr = PRIOR_FIRST + len(C.PRIOR_ORDERS)
    CONTEXTS: tl.constexpr = PRIOR_END + 1
    F: tl.constexpr = token.shape[0]
    O: tl.constexpr = token.shape[1]
    offs_o = tl.arange(0, O)
    total = total.to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    smoothing = tl.full((), C.SMOOTHING[0], tl.float64)
    trust = tl.full((), C.TRUST[0], tl.float64)
    if PRIOR_FIRST < PRIOR_END:
        of_prior = ((offs_o >= PRIOR_FIRST) & (offs_o < PRIOR_END))[None, :]
        smoothing = tl.where(of_prior, tl.full((), C.SMOOTHING[1], tl.float64), smoothing)
        trust = tl.where(of_prior, tl.full((), C.TRUST[1], tl.float64), trust)
    trust = total * trust / (total + smoothing)
    # [F], [F, O], [O]: share left for the following contexts, each context's share, its beta
    rem = tl.full([F], 1.0, tl.float64)
    share = tl.zeros([F, O], tl.float64)
    beta = tl.zeros([O], tl.float64)
    # unrolled by three: with all 9 unrolled, Triton 3.6 spills registers
    for o in tl.range(CONTEXTS, loop_unroll_factor=3):
        of_order = tl.sum(tl.where(offs_o[None, :] == o, trust, 0.0), 1)
        share = tl.where(offs_o[None, :] == o, (rem * of_order)[:, None], share)
        rem = rem * (one - of_order)
    for o in tl.static_range(CONTEXTS):
        beta = tl.where(offs_o == o, tl.full((), C.BETAS[o], tl.float64), beta)
    total = tl.maximum(total, one)
    # [F, O, BLOCK_E]
    weight = weight.to(tl.float64)
    part, each = share / total, weight
    if sampled:
        mine = tl.where(by_self, weight * tl.full((), C.OWN_WEIGHT, tl.float64), weight)
        seen = tl.sum(weight, 2)
        scale = seen / (tl.maximum(tl.sum(mine, 2), one) * total)
        rest = tl.maximum(one - seen / total, tl.full((), TAIL, tl.float64))
        rest = tl.log(rest) + tl.full((), EULER_GAMMA, tl.float64)
        g = gumbel64(philox_word(key, tl.maximum(token, 0), position, sample, SAMPLE))
        some = mine > 0.0
        mine = mine * scale[:, :, None]
        score = tl.log(tl.where(some, mine, 1.0))
        score = tl.where(some, tl.exp((score + g) * beta[None, :, None]), 0.0)
        norm = tl.sum(score, 2) + tl.exp(rest * beta[None, :])
        norm = tl.full((), 1.0 - C.UNCOUPLED, tl.float64) / norm
        part = share
        each = norm[:, :, None] * score + tl.full((), C.UNCOUPLED, tl.float64) * mine
    return (part[:, :, None] * each * ONE).to(tl.int32)


@triton.jit
def likeliest(
    token,  # [F, O, E] int32, -1 where absent
    mass,  # [F, O, E] int32
    source,  # [F, O, E] int32: OWN, SIBLING or PROMPT, 0 for HISTORY
    PRIOR_FIRST: tl.constexpr,  # the prior's contexts are those from it up to PRIOR_END
    PRIOR_END: tl.constexpr,
):
    """[F, MAX_CHILDREN] int32: token, q and source of the likeliest successors; q is 0 for none."""
    F: tl.constexpr = token.shape[0]
    O: tl.constexpr = token.shape[1]
    OE: tl.constexpr = O * token.shape[2]
    # by token, then longest context first; successors without mass come last
    order = tl.arange(0, O)[None, :, None].to(tl.int64)
    key = (token.to(tl.int64) << 32) | (order << 27) | (source.to(tl.int64) << 25) | mass
    key = tl.reshape(tl.where((token >= 0) & (mass > 0), key, NONE), [F, OE])
    key = tl.sort(key, 1)
    # [F, OE]
    token = (key >> 32).to(tl.int32)
    source = (key >> 25).to(tl.int32) & 3
    source = tl.where(source == 0, HISTORY, source)
    if PRIOR_FIRST < PRIOR_END:
        column = (key >> 27).to(tl.int32) & 31
        source = tl.where((column >= PRIOR_FIRST) & (column < PRIOR_END), PRIOR, source)
    q = tl.where(key < NONE, key.to(tl.int32) & ((1 << 25) - 1), 0)
    # a token's masses are adjacent, one per context: sums of 2, 4, .. from each on
    index = tl.arange(0, OE)[None, :] + tl.zeros([F, OE], tl.int32)
    before = tl.gather(token, tl.maximum(index - 1, 0), 1)
    first = (index == 0) | (before != token)
    for i in tl.static_range(SUM_ROUNDS):
        if 1 << i < O:
            after = tl.minimum(index + (1 << i), OE - 1)
            equal = (tl.gather(token, after, 1) == token) & (index + (1 << i) < OE)
            q += tl.where(equal, tl.gather(q, after, 1), 0)
    q = tl.where(first, tl.minimum(q, ONE), 0)
    offs_k = tl.arange(0, MAX_CHILDREN)[None, :]
    best_token = tl.full([F, MAX_CHILDREN], -1, tl.int32)
    best_q = tl.zeros([F, MAX_CHILDREN], tl.int32)
    best_source = tl.zeros([F, MAX_CHILDREN], tl.int32)
    for k in range(0, MAX_CHILDREN):
        peak = tl.max(q, 1)[:, None]
        who = tl.min(tl.where(q == peak, token, LAST_TOKEN), 1)[:, None]
        mine = first & (token == who)
        best_q = tl.where(offs_k == k, peak, best_q)
        best_token = tl.where(offs_k == k, who, best_token)
        whose = tl.max(tl.where(mine, source, 0), 1)[:, None]
        best_source = tl.where(offs_k == k, whose, best_source)
        q = tl.where(mine, 0, q)
    return best_token, best_q, best_source


@triton.jit
def edge_cost(
    q,  # int32, probability * ONE
):
    """int64: cost of each edge."""
    p = q.to(tl.float64) * tl.full((), 1.0 / ONE, tl.float64)
    cost = (0.0 - tl.log(p)) * tl.full((), UNIT, tl.float64) + 0.5
    return cost.to(tl.int64)


@triton.jit
def look_up(
    context,  # [F, BLOCK_N] int32
    group,  # [F] int64
    front,  # number of contexts
    size,  # [O] int32, tokens of each order; 0 if it is not looked up
    whole,  # [O] bool: the order that stands for the context of the group as a whole
    sample,
    table,
    first,  # first entry of the part that is looked in
    buckets,
    WAYS: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
):
    """Looks up each context; returns total, token, weight, by_self and source.

    total: [F, O], 0 if absent. The others: [F, O, BLOCK_E], of the successors; token is -1 and
    weight 0 if absent, by_self is true if the sample itself has observed the successor.
    """
    BLOCK_E: tl.constexpr = C.BLOCK_E
    HASH: tl.constexpr = C.HASH
    offs_e = tl.arange(0, BLOCK_E)[None, None, :]
    tokens = cut_context(context, size)
    any_token = whole[None, :, None] & (tl.arange(0, context.shape[1]) == 0)[None, None, :]
    tokens = tl.where(any_token, ANY, tokens)
    code = hash_tokens(tokens, group, size, HASH)
    mask = (tl.arange(0, context.shape[0]) < front)[:, None] & (size > 0)[None, :]
    entry, present = probe_entries(code, mask, table.entry_hash + first, buckets, WAYS)
    # all of an entry is loaded before its key is compared, so that the loads overlap
    offsets = entry[:, :, None] * E + offs_e
    held = present[:, :, None] & (offs_e < E)
    token = tl.load(table.succ_token + first * E + offsets, mask=held, other=-1)
    weight = tl.load(table.succ_weight + first * E + offsets, mask=held, other=0)
    bits = tl.load(table.succ_source + first * E + offsets, mask=held, other=0)
    total = tl.load(table.entry_total + first + entry, mask=present, other=0)
    groups, held_tokens = table.entry_group + first, table.entry_tokens + first * N
    present = holds_context(entry, present, group, tokens, groups, held_tokens, N)
    token = tl.where(present[:, :, None], token, -1)
    weight = tl.where(token >= 0, weight, 0)
    total = tl.where(present, total, 0)
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
