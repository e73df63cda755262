"""The kernel of `observe`, which may also claim its rows: the first launch of a step's insert."""

from typing import Any

import triton
import triton.language as tl

from csd.kernels.table import rows
from csd.kernels.table.rows import GROUP_SLOTS, Observed
from csd.kernels.table.triton.claim import Contexts, claim_rows
from csd.state import context_table
from csd.state import verdict as verdicts
from csd.state.context_table import GraphConfig
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

ANY = tl.constexpr(context_table.ANY)
ONE = tl.constexpr(context_table.WEIGHT_ONE)
SAMPLE_BITS = tl.constexpr(context_table.SAMPLE_BITS)
TOP = tl.constexpr(verdicts.TOP)
BLOCK_U = tl.constexpr(triton.next_power_of_2(rows.SUCCESSORS))
BLOCK_S = tl.constexpr(64)
BLOCK_R = 4


@triton.jit(do_not_specialize=["M", "S", "buckets"])
def observe_claim_kernel(
    pool,
    slots,
    verdict,
    out,  # `Observed` of M + S rows
    M,
    S,
    SOFT: tl.constexpr,
    HARD: tl.constexpr,
    A: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    # arguments of the claim, if there is one
    table=None,
    keys=None,
    buckets=None,
):
    """Writes BLOCK_R rows, and claims their keys if there are `keys`."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # [BLOCK_R]
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = r < M + S
    node = r < M
    slot = tl.load(pool.slot + r, mask=node, other=0)
    slot = tl.where(node, tl.maximum(slot, 0), tl.minimum(r - M, S - 1))
    group = tl.maximum(tl.load(slots.group + slot), 0)
    key = tl.load(slots.group_key + group)
    bit = tl.load(slots.sample + slot) % SAMPLE_BITS
    depth = tl.load(pool.depth + r, mask=node, other=0)
    accepted = node & (tl.load(verdict.accept_row + slot * A + depth) == r)
    drawn = tl.load(verdict.sample + r, mask=node, other=-1)

    # [BLOCK_R, BLOCK_U]
    u = tl.arange(0, BLOCK_U)[None, :]
    likely = node[:, None] & (u < TOP)
    offsets = r[:, None] * TOP + u
    scaled = tl.load(verdict.top_prob + offsets, mask=likely, other=0.0).to(tl.float64) * SOFT
    whole = tl.floor(scaled)
    left = scaled - whole
    top = whole.to(tl.int32)
    up = (left > 0.5) | ((left == 0.5) & (top % 2 == 1))
    top += up.to(tl.int32)
    has_top = tl.max(top, 1) > 0
    hard = tl.where(accepted, tl.where(has_top, HARD, SOFT), 0)
    token = tl.load(verdict.top_token + offsets, mask=likely, other=-1)
    equal = likely & (token == drawn[:, None])
    weight = top + tl.where(equal, hard[:, None], 0)
    ninth = hard - tl.sum(tl.where(equal, hard[:, None], 0), 1)
    weight = tl.where(u == TOP, ninth[:, None], weight)
    token = tl.where(u == TOP, drawn[:, None], token)
    total = hard + tl.where(has_top, SOFT, 0)

    # a slot's own row; many slots of a group take turns
    own_group = tl.load(slots.group + slot)
    # [BLOCK_R, BLOCK_S]: slots of the group that have a path, and those of them before the slot
    mates = tl.zeros([BLOCK_R, BLOCK_S], tl.int32)
    before = tl.zeros([BLOCK_R, BLOCK_S], tl.int32)
    # programs whose rows are all nodes skip the loop
    some = tl.max(r, 0) >= M
    for start in range(0, S * some.to(tl.int32), BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[None, :]
        path = tl.load(verdict.accept_row + s * A, mask=s < S, other=-1) >= 0
        mate = path & (tl.load(slots.group + s, mask=s < S, other=-1) == own_group[:, None])
        mates += mate.to(tl.int32)
        before += (mate & (s < slot[:, None])).to(tl.int32)
    rounds = tl.maximum((tl.sum(mates, 1) + GROUP_SLOTS - 1) // GROUP_SLOTS, 1)
    due = (tl.load(slots.step + slot) + tl.sum(before, 1)) % rounds == 0
    of_slot = (inside & (r >= M))[:, None] & (u <= TOP)
    path = tl.load(verdict.accept_row + slot[:, None] * A + u, mask=of_slot, other=-1)
    word = tl.load(verdict.sample + tl.maximum(path, 0), mask=of_slot, other=-1)
    update = tl.where((path >= 0) & due[:, None], ONE, 0)
    token = tl.where(node[:, None], token, word)
    weight = tl.where(node[:, None], weight, update)
    total = tl.where(node, total, tl.sum(update, 1))

    key = tl.where(total > 0, key, -1)
    tl.store(out.group_key + r, key, mask=inside)
    tl.store(out.row_total + r, total, mask=inside)
    tl.store(out.source_bit + r, bit, mask=inside)
    place = r[:, None] * (TOP + 1) + u
    written = inside[:, None] & (u <= TOP)
    tl.store(out.succ_token + place, token, mask=written)
    tl.store(out.succ_weight + place, weight, mask=written)
    # [BLOCK_R, BLOCK_N]
    n = tl.arange(0, BLOCK_N)[None, :]
    offsets = r[:, None] * C.N + n
    before = tl.load(pool.context + offsets, mask=node[:, None] & (n < C.N), other=-1)
    anything = (r >= M)[:, None] & (n == 0)
    context = tl.where(anything, ANY, before)
    tl.store(out.context + offsets, context, mask=inside[:, None] & (n < C.N))
    if keys is not None:
        claim_rows(r, key, context, table, keys, M + S, buckets, C)


def observe_triton(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """One launch."""
    out = rows.observed_rows(pool, slots)
    N = out.context.shape[1]
    observe_claim_kernel[(triton.cdiv(out.group_key.shape[0], BLOCK_R),)](
        **observe_arguments(pool, slots, verdict, config, out),
        C=Contexts(N, triton.next_power_of_2(N)),
        BLOCK_R=BLOCK_R,
        num_warps=1,
    )
    return out


def observe_arguments(
    pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig, out: Observed
) -> dict[str, Any]:
    """Keyword arguments of the kernel, except those of contexts, claim and block of rows."""
    read = (rows.POOL(pool), rows.SLOTS(slots), rows.VERDICT(verdict))
    names = "pool", "slots", "verdict"
    return dict(
        **{n: type(v)(*[x.contiguous() for x in v]) for n, v in zip(names, read, strict=True)},
        out=out,
        M=pool.context.shape[0],
        S=slots.group.shape[0],
        SOFT=config.soft_weight,
        HARD=config.hard_weight,
        A=verdict.accept_row.shape[1],
        GROUP_SLOTS=GROUP_SLOTS,
    )
