"""Grow one slot's tree a program: the first kernel of `csd/kernels/draft_tree.py`.

A drafted node is one int64, and nodes go in the order of these:

    cost << 41 | (depth - 1) << 37 | token << 6 | rank of its parent in the frontier << 2 | source

the cost with the slot's head start in it. The slot's cheapest nodes of all levels so far are a
sorted list, into which each level's children are merged. Since a node of the list keeps its
place among those of its depth, that is its rank in its level's frontier: no link is stored.
"""

import triton
import triton.language as tl

from csd import pool
from csd.graph import table
from csd.kernels import draft_tree_ref, noise
from csd.kernels.graph_lookup_kernel import (
    cut_context,
    hash_tokens,
    holds_context,
    load_context,
    order_sizes,
    probe_entries,
)
from csd.kernels.noise_kernel import gumbel64, philox_word

MAX_NODES = tl.constexpr(pool.MAX_NODES)
MAX_CHILDREN = tl.constexpr(pool.MAX_CHILDREN)
OWN, SIBLING = tl.constexpr(pool.OWN), tl.constexpr(pool.SIBLING)
PROMPT = tl.constexpr(pool.PROMPT)
SOURCES = tl.constexpr(table.SOURCES)
ANY = tl.constexpr(table.ANY)
SAMPLES = tl.constexpr((1 << table.PROMPT_BIT) - 1)
ONE = tl.constexpr(draft_tree_ref.ONE)
UNIT = tl.constexpr(draft_tree_ref.UNIT)
EULER_GAMMA = tl.constexpr(draft_tree_ref.EULER_GAMMA)
TAIL = tl.constexpr(draft_tree_ref.TAIL)
SAMPLE = tl.constexpr(noise.SAMPLE)
MOST_AHEAD = tl.constexpr(pool.MOST_AHEAD)
LAST_TOKEN = tl.constexpr((1 << 31) - 1)
# doublings that reach all of a token's contexts: 16 orders and the group as a whole
SUM_ROUNDS = tl.constexpr(5)
# behind every node
NONE = tl.constexpr((1 << 63) - 1)


@triton.jit
def live_slots(live_ptr, slots, BLOCK_S: tl.constexpr):
    """How many slots are live."""
    live = tl.zeros([BLOCK_S], tl.int32)
    for start in range(0, slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live += tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0).to(tl.int32)
    return tl.sum(live, 0)


@triton.jit
def head_start(live_ptr, generated_ptr, pace_ptr, slot, slots, BLOCK_S: tl.constexpr):
    """What is added to the costs of a live slot's nodes; as `csd.pool.head_starts`."""
    fewest = tl.load(generated_ptr + slot)
    ahead = fewest
    for start in range(0, slots, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        live = tl.load(live_ptr + offs_s, mask=offs_s < slots, other=0) != 0
        others = tl.load(generated_ptr + offs_s, mask=live, other=(1 << 31) - 1)
        fewest = tl.minimum(fewest, tl.min(others, 0))
    return tl.minimum(tl.load(pace_ptr + slot) * (ahead - fewest), MOST_AHEAD)


@triton.jit
def _masses(
    total,  # [F, O] int32, longest order first, 0 where absent
    token,  # [F, O, E] int32, -1 where absent
    weight,  # [F, O, E] int32, 0 where absent
    by_self,  # [F, O, E]: whether the sample itself has had it there
    key,
    sample,
    position,
    sampled,
    CONTEXTS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    TRUST: tl.constexpr,
    OWN_WEIGHT: tl.constexpr,
    BETAS: tl.constexpr,
    UNCOUPLED: tl.constexpr,
):
    """[F, O, E] int32: what each successor of each context adds to q of its token."""
    F: tl.constexpr = token.shape[0]
    O: tl.constexpr = token.shape[1]
    offs_o = tl.arange(0, O)
    total = total.to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    trust = total * tl.full((), TRUST, tl.float64)
    trust = trust / (total + tl.full((), SMOOTHING, tl.float64))
    # [F], [F, O], [O]; what is left for the contexts that follow, and what each takes of it
    rem = tl.full([F], 1.0, tl.float64)
    share = tl.zeros([F, O], tl.float64)
    beta = tl.zeros([O], tl.float64)
    # few at a time: with all of 9 unrolled, Triton 3.6 spills registers
    for o in tl.range(CONTEXTS, loop_unroll_factor=3):
        of_order = tl.sum(tl.where(offs_o[None, :] == o, trust, 0.0), 1)
        share = tl.where(offs_o[None, :] == o, (rem * of_order)[:, None], share)
        rem = rem * (one - of_order)
    for o in tl.static_range(CONTEXTS):
        beta = tl.where(offs_o == o, tl.full((), BETAS[o], tl.float64), beta)
    total = tl.maximum(total, one)
    # [F, O, BLOCK_E]
    weight = weight.to(tl.float64)
    part, each = share / total, weight
    if sampled:
        mine = tl.where(by_self, weight * tl.full((), OWN_WEIGHT, tl.float64), weight)
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
        norm = tl.full((), 1.0 - UNCOUPLED, tl.float64) / norm
        part = share
        each = norm[:, :, None] * score + tl.full((), UNCOUPLED, tl.float64) * mine
    return (part[:, :, None] * each * ONE).to(tl.int32)


@triton.jit
def _likeliest(
    token,  # [F, O, E] int32, -1 where absent
    mass,  # [F, O, E] int32
    source,  # [F, O, E] int32
):
    """[F, MAX_CHILDREN] int32: token, q and source of the likeliest successors; q 0 is none."""
    F: tl.constexpr = token.shape[0]
    O: tl.constexpr = token.shape[1]
    OE: tl.constexpr = O * token.shape[2]
    # by token, then longest context first; whatever has no mass comes last
    order = tl.arange(0, O)[None, :, None].to(tl.int64)
    key = (token.to(tl.int64) << 32) | (order << 27) | (source.to(tl.int64) << 25) | mass
    key = tl.reshape(tl.where((token >= 0) & (mass > 0), key, NONE), [F, OE])
    key = tl.sort(key, 1)
    # [F, OE]
    token = (key >> 32).to(tl.int32)
    source = (key >> 25).to(tl.int32) & 3
    q = tl.where(key < NONE, key.to(tl.int32) & ((1 << 25) - 1), 0)
    # a token's masses are neighbours, one a context: sums of 2, 4, .. from each on
    at = tl.arange(0, OE)[None, :] + tl.zeros([F, OE], tl.int32)
    before = tl.gather(token, tl.maximum(at - 1, 0), 1)
    first = (at == 0) | (before != token)
    for i in tl.static_range(SUM_ROUNDS):
        if 1 << i < O:
            behind = tl.minimum(at + (1 << i), OE - 1)
            equal = (tl.gather(token, behind, 1) == token) & (at + (1 << i) < OE)
            q += tl.where(equal, tl.gather(q, behind, 1), 0)
    q = tl.where(first, tl.minimum(q, ONE), 0)
    offs_k = tl.arange(0, MAX_CHILDREN)[None, :]
    best_token = tl.full([F, MAX_CHILDREN], -1, tl.int32)
    best_q = tl.zeros([F, MAX_CHILDREN], tl.int32)
    best_source = tl.zeros([F, MAX_CHILDREN], tl.int32)
    for k in range(0, MAX_CHILDREN):
        most = tl.max(q, 1)[:, None]
        who = tl.min(tl.where(q == most, token, LAST_TOKEN), 1)[:, None]
        mine = first & (token == who)
        best_q = tl.where(offs_k == k, most, best_q)
        best_token = tl.where(offs_k == k, who, best_token)
        whose = tl.max(tl.where(mine, source, 0), 1)[:, None]
        best_source = tl.where(offs_k == k, whose, best_source)
        q = tl.where(mine, 0, q)
    return best_token, best_q, best_source


@triton.jit
def _edge(
    q,  # int32, probability * ONE
):
    """int64: cost of each edge."""
    p = q.to(tl.float64) * tl.full((), 1.0 / ONE, tl.float64)
    cost = (0.0 - tl.log(p)) * tl.full((), UNIT, tl.float64) + 0.5
    return cost.to(tl.int64)


@triton.jit
def _by_place(place, value, W: tl.constexpr):
    """[W]: the values [C] whose places [C], all different, are 0, 1, ..; 0 where none has it."""
    hit = place[:, None] == tl.arange(0, W)[None, :]
    return tl.sum(tl.where(hit, value[:, None], 0), 0)


@triton.jit
def _ranks(nodes, child):
    """Each child's place among the children [C], and its place and each node's [n] in both lists.

    nodes: sorted. Everything is compared with everything: a sort's steps wait for each other.
    """
    offs_c = tl.arange(0, child.shape[0])
    # [C, C] and [n, C]: those that come before, down
    other = child[:, None]
    before = (other < child[None, :]) | (
        (other == child[None, :]) & (offs_c[:, None] < offs_c[None, :])
    )
    rank = tl.sum(before.to(tl.int32), 0)
    place = rank + tl.sum((nodes[:, None] <= child[None, :]).to(tl.int32), 0)
    cheaper = tl.sum((other < nodes[None, :]).to(tl.int32), 0)
    return rank, place, tl.arange(0, nodes.shape[0]) + cheaper


@triton.jit(do_not_specialize=["slots", "rows", "most", "buckets", "max_depth", "max_cost"])
def _grow_kernel(
    live_ptr,  # [S] bool
    group_ptr,  # [S] int32
    key_ptr,  # [S] int64
    sample_ptr,  # [S] int32
    generated_ptr,  # [S] int32
    pace_ptr,  # [S] int32
    max_new_ptr,  # [S] int32
    temperature_ptr,  # [S] float64
    context_ptr,  # [S, N] int32
    stop_ids_ptr,  # [S, STOPS] int32
    group_key_ptr,  # [G] int64
    entry_group_ptr,  # [C] int64
    entry_hash_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    entry_total_ptr,  # [C] int32
    succ_token_ptr,  # [C, E] int32
    succ_weight_ptr,  # [C, E] int32
    succ_source_ptr,  # [C, E] int64
    nodes_ptr,  # [S, MAX_NODES] int64, out: a live slot's nodes in order, then NONE
    children_ptr,  # [S, CHILDREN] int64, a level's
    slots,
    rows,
    most,  # drafted nodes of all slots
    buckets,
    max_depth,
    max_cost,  # of a path
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERS: tl.constexpr,  # longest first
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SMOOTHING: tl.constexpr,
    TRUST: tl.constexpr,
    OWN_WEIGHT: tl.constexpr,
    BETAS: tl.constexpr,  # of ORDERS, and of the group as a whole
    UNCOUPLED: tl.constexpr,
    LEVEL_COST: tl.constexpr,
    FRONTIER: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    slot = tl.program_id(0)
    if tl.load(live_ptr + slot) == 0:
        return
    # nodes beyond this place of the list cannot enter the pool
    room = tl.minimum(most, rows - live_slots(live_ptr, slots, BLOCK_S))
    width = tl.minimum(MAX_NODES - 1, room)
    generated = tl.load(generated_ptr + slot)
    max_depth = tl.minimum(max_depth, tl.load(max_new_ptr + slot) - 1 - generated)
    key, sample = tl.load(key_ptr + slot), tl.load(sample_ptr + slot)
    sampled = tl.load(temperature_ptr + slot) > 0
    group_key = tl.load(group_key_ptr + tl.load(group_ptr + slot))
    # longest first, then the group as a whole: what follows ANY
    CONTEXTS: tl.constexpr = len(ORDERS) + 1
    offs_o = tl.arange(0, BLOCK_O)
    whole = offs_o == len(ORDERS)
    size = tl.where(whole, 1, order_sizes(ORDERS, BLOCK_O))

    offs_e = tl.arange(0, BLOCK_E)[None, None, :]
    offs_f = tl.arange(0, BLOCK_F)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, MAX_NODES)
    CHILDREN: tl.constexpr = BLOCK_F * MAX_CHILDREN
    offs_c = tl.arange(0, CHILDREN)
    offs_k = tl.arange(0, MAX_CHILDREN)[None, :]
    scratch_ptr = children_ptr + slot * CHILDREN
    # [BLOCK_F]: the frontier; at first the root, in every row
    group = tl.zeros([BLOCK_F], tl.int64) + group_key
    first_cost = head_start(live_ptr, generated_ptr, pace_ptr, slot, slots, BLOCK_S).to(tl.int64)
    cost = tl.zeros([BLOCK_F], tl.int64) + first_cost
    context = load_context(context_ptr, slot + 0 * offs_f, offs_f < BLOCK_F, N, BLOCK_N)
    front = tl.where(width > 0, 1, 0)
    # [MAX_NODES]
    nodes = tl.full([MAX_NODES], NONE, tl.int64)
    depth = tl.zeros((), tl.int32)
    while (depth < max_depth) & (front > 0):
        # [BLOCK_F, BLOCK_O], then [BLOCK_F, MAX_CHILDREN]
        tokens = cut_context(context, size)
        any_token = whole[None, :, None] & (offs_n == 0)[None, None, :]
        tokens = tl.where(any_token, ANY, tokens)
        code = hash_tokens(tokens, group, size, HASH)
        mask = (offs_f < front)[:, None] & (size > 0)[None, :]
        entry, found = probe_entries(code, mask, entry_hash_ptr, buckets, WAYS)
        # all that an entry holds is on its way before it is known whether it is the context's
        # [BLOCK_F, BLOCK_O, BLOCK_E]
        at = entry[:, :, None] * E + offs_e
        held = found[:, :, None] & (offs_e < E)
        token = tl.load(succ_token_ptr + at, mask=held, other=-1)
        weight = tl.load(succ_weight_ptr + at, mask=held, other=0)
        said = tl.load(succ_source_ptr + at, mask=held, other=0)
        whole_total = tl.load(entry_total_ptr + entry, mask=found, other=0)
        found = holds_context(
            entry, found, group, tokens, entry_group_ptr, entry_tokens_ptr, N
        )
        token = tl.where(found[:, :, None], token, -1)
        weight = tl.where(token >= 0, weight, 0)
        whole_total = tl.where(found, whole_total, 0)
        by_self = ((said >> (sample % SOURCES).to(tl.int64)) & 1) == 1
        by_sample = (said & SAMPLES) != 0
        source = tl.where(by_self, OWN, tl.where(by_sample, SIBLING, PROMPT))
        mass = _masses(
            whole_total, token, weight, by_self, key, sample, generated + depth, sampled, CONTEXTS,
            SMOOTHING, TRUST, OWN_WEIGHT, BETAS, UNCOUPLED,
        )  # fmt: skip
        # [BLOCK_F, MAX_CHILDREN]
        token, q, source = _likeliest(token, mass, source)
        child = (q.to(tl.int64) << 33) | (token.to(tl.int64) & LAST_TOKEN) << 2 | source
        # through memory, so that each is one thread's: as they are, many threads hold the same
        tl.debug_barrier()
        tl.store(scratch_ptr + offs_f[:, None] * MAX_CHILDREN + offs_k, child)
        tl.debug_barrier()
        # [CHILDREN]
        child = tl.load(scratch_ptr + offs_c)
        q, token = (child >> 33).to(tl.int32), child >> 2 & LAST_TOKEN
        some = q > 0
        for i in tl.static_range(STOPS):
            some = some & (token != tl.load(stop_ids_ptr + slot * STOPS + i))
        above = tl.gather(cost, offs_c // MAX_CHILDREN, 0)
        total = above + _edge(tl.where(some, q, ONE)) + LEVEL_COST
        some = some & (total <= max_cost + first_cost)
        node = (total << 41) | (depth.to(tl.int64) << 37) | (token << 6)
        node |= (offs_c // MAX_CHILDREN << 2) | (child & 3)
        tl.debug_barrier()
        tl.store(scratch_ptr + offs_c, tl.where(some, node, NONE))
        tl.debug_barrier()
        child = tl.load(scratch_ptr + offs_c)

        # [MAX_NODES]: the cheapest of both
        rank, place, node_place = _ranks(nodes, child)
        nodes = _by_place(place, child, MAX_NODES) + _by_place(node_place, nodes, MAX_NODES)
        nodes = tl.where(offs_p < width, nodes, NONE)

        # the next frontier: this level's cheapest, as far as the list holds them
        last_node = tl.max(tl.where(nodes < NONE, nodes, -1), 0)
        # [BLOCK_F]
        chosen = _by_place(rank, child, BLOCK_F)
        ahead = (chosen <= last_node) & (offs_f < FRONTIER)
        front = tl.sum(ahead.to(tl.int32), 0)
        chosen = tl.where(ahead, chosen, 0)
        cost = chosen >> 41
        parent = ((chosen >> 2) & 15).to(tl.int32)
        # [BLOCK_F, BLOCK_F, BLOCK_N], then [BLOCK_F, BLOCK_N, BLOCK_N]
        mine = parent[:, None, None] == offs_f[None, :, None]
        context = tl.sum(tl.where(mine, context[None, :, :], 0), 1)
        before = offs_n[None, :, None] == offs_n[None, None, :] + 1
        context = tl.sum(tl.where(before, context[:, None, :], 0), 2)
        last = ((chosen >> 6) & LAST_TOKEN).to(tl.int32)
        context = tl.where(offs_n[None, :] == 0, last[:, None], context)
        depth += 1
    tl.store(nodes_ptr + slot * MAX_NODES + offs_p, nodes)
