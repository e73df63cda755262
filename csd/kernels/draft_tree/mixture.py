"""The likeliest children of a frontier's nodes, by a mixture of their contexts' successors."""

import triton
import triton.language as tl

from csd.kernels import noise
from csd.kernels.draft_tree import constants
from csd.state import pool

MAX_CHILDREN = tl.constexpr(pool.MAX_CHILDREN)
ONE, UNIT = tl.constexpr(constants.ONE), tl.constexpr(constants.UNIT)
EULER_GAMMA, TAIL = tl.constexpr(constants.EULER_GAMMA), tl.constexpr(constants.TAIL)
SAMPLE = tl.constexpr(noise.SAMPLE)
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
    CONTEXTS: tl.constexpr,
    PRIOR_FIRST: tl.constexpr,  # the prior's contexts are those from it up to PRIOR_END
    PRIOR_END: tl.constexpr,
    SMOOTHING: tl.constexpr,  # of the groups' contexts, and of the prior's
    TRUST: tl.constexpr,
    OWN_WEIGHT: tl.constexpr,
    BETAS: tl.constexpr,
    UNCOUPLED: tl.constexpr,
):
    """[F, O, E] int32: mass that each successor of each context adds to q of its token."""
    F: tl.constexpr = token.shape[0]
    O: tl.constexpr = token.shape[1]
    offs_o = tl.arange(0, O)
    total = total.to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    smoothing = tl.full((), SMOOTHING[0], tl.float64)
    trust = tl.full((), TRUST[0], tl.float64)
    if PRIOR_FIRST < PRIOR_END:
        of_prior = ((offs_o >= PRIOR_FIRST) & (offs_o < PRIOR_END))[None, :]
        smoothing = tl.where(of_prior, tl.full((), SMOOTHING[1], tl.float64), smoothing)
        trust = tl.where(of_prior, tl.full((), TRUST[1], tl.float64), trust)
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
        g = noise.gumbel64(noise.philox_word(key, tl.maximum(token, 0), position, sample, SAMPLE))
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
        place = (key >> 27).to(tl.int32) & 31
        source = tl.where((place >= PRIOR_FIRST) & (place < PRIOR_END), PRIOR, source)
    q = tl.where(key < NONE, key.to(tl.int32) & ((1 << 25) - 1), 0)
    # a token's masses are adjacent, one per context: sums of 2, 4, .. from each on
    at = tl.arange(0, OE)[None, :] + tl.zeros([F, OE], tl.int32)
    before = tl.gather(token, tl.maximum(at - 1, 0), 1)
    first = (at == 0) | (before != token)
    for i in tl.static_range(SUM_ROUNDS):
        if 1 << i < O:
            after = tl.minimum(at + (1 << i), OE - 1)
            equal = (tl.gather(token, after, 1) == token) & (at + (1 << i) < OE)
            q += tl.where(equal, tl.gather(q, after, 1), 0)
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
def edge_cost(
    q,  # int32, probability * ONE
):
    """int64: cost of each edge."""
    p = q.to(tl.float64) * tl.full((), 1.0 / ONE, tl.float64)
    cost = (0.0 - tl.log(p)) * tl.full((), UNIT, tl.float64) + 0.5
    return cost.to(tl.int64)
