"""The kernel of `observe`, which may also claim its rows: the first launch of a step's insert."""

from typing import Any

import triton
import triton.language as tl

from csd.kernels.table.rows import GROUP_SLOTS, SUCCESSORS, Observed, observed_rows
from csd.kernels.table.triton.claim import claim_rows
from csd.state.context_table import ANY, SAMPLE_BITS, WEIGHT_ONE, GraphConfig
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

BLOCK_R, BLOCK_S = 4, 64


@triton.jit(do_not_specialize=["rows", "slots", "buckets"])
def _observe_claim_kernel(
    slot_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    context_ptr,  # [M, N] int32
    group_ptr,  # [S] int32
    sample_index_ptr,  # [S] int32
    group_key_ptr,  # [G] int64
    step_ptr,  # [S] int32
    sample_ptr,  # [M] int32
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    accept_row_ptr,  # [S, A] int32
    out_key_ptr,  # [M + S] int64
    out_context_ptr,  # [M + S, N] int32
    out_token_ptr,  # [M + S, TOP + 1] int32
    out_weight_ptr,  # [M + S, TOP + 1] int32
    out_total_ptr,  # [M + S] int32
    out_bit_ptr,  # [M + S] int32
    rows,
    slots,
    SOFT: tl.constexpr,
    HARD: tl.constexpr,
    ONE: tl.constexpr,
    ANY: tl.constexpr,
    SAMPLE_BITS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    # of the claim, if there is one
    entry_group_ptr=None,  # [C] int64
    entry_hash_ptr=None,  # [C] int64
    entry_tokens_ptr=None,  # [C, N] int32
    code_ptr=None,  # [K] int64, out: hash
    entry_ptr=None,  # [K] int32, out, as `_claim_kernel` has it
    buckets=None,
    ORDERS: tl.constexpr = None,
    BLOCK_O: tl.constexpr = None,
    HASH: tl.constexpr = None,
    WAYS: tl.constexpr = None,
):
    """Writes BLOCK_R rows, and claims their keys if there is `code_ptr`."""
    # [BLOCK_R]
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = r < rows + slots
    node = r < rows
    slot = tl.load(slot_ptr + r, mask=node, other=0)
    slot = tl.where(node, tl.maximum(slot, 0), tl.minimum(r - rows, slots - 1))
    group = tl.maximum(tl.load(group_ptr + slot), 0)
    key = tl.load(group_key_ptr + group)
    bit = tl.load(sample_index_ptr + slot) % SAMPLE_BITS
    depth = tl.load(depth_ptr + r, mask=node, other=0)
    accepted = node & (tl.load(accept_row_ptr + slot * A + depth) == r)
    drawn = tl.load(sample_ptr + r, mask=node, other=-1)

    # [BLOCK_R, BLOCK_U]
    u = tl.arange(0, BLOCK_U)[None, :]
    likely = node[:, None] & (u < TOP)
    offsets = r[:, None] * TOP + u
    scaled = tl.load(top_prob_ptr + offsets, mask=likely, other=0.0).to(tl.float64) * SOFT
    whole = tl.floor(scaled)
    left = scaled - whole
    top = whole.to(tl.int32)
    up = (left > 0.5) | ((left == 0.5) & (top % 2 == 1))
    top += up.to(tl.int32)
    has_top = tl.max(top, 1) > 0
    hard = tl.where(accepted, tl.where(has_top, HARD, SOFT), 0)
    token = tl.load(top_token_ptr + offsets, mask=likely, other=-1)
    equal = likely & (token == drawn[:, None])
    weight = top + tl.where(equal, hard[:, None], 0)
    ninth = hard - tl.sum(tl.where(equal, hard[:, None], 0), 1)
    weight = tl.where(u == TOP, ninth[:, None], weight)
    token = tl.where(u == TOP, drawn[:, None], token)
    total = hard + tl.where(has_top, SOFT, 0)

    # a slot's own row; many slots of a group take turns
    own_group = tl.load(group_ptr + slot)
    # [BLOCK_R, BLOCK_S]: slots of the group that have a path, and those of them before the slot
    mates = tl.zeros([BLOCK_R, BLOCK_S], tl.int32)
    before = tl.zeros([BLOCK_R, BLOCK_S], tl.int32)
    # programs whose rows are all nodes skip the loop
    some = tl.max(r, 0) >= rows
    for start in range(0, slots * some.to(tl.int32), BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)[None, :]
        path = tl.load(accept_row_ptr + s * A, mask=s < slots, other=-1) >= 0
        mate = path & (tl.load(group_ptr + s, mask=s < slots, other=-1) == own_group[:, None])
        mates += mate.to(tl.int32)
        before += (mate & (s < slot[:, None])).to(tl.int32)
    rounds = tl.maximum((tl.sum(mates, 1) + GROUP_SLOTS - 1) // GROUP_SLOTS, 1)
    due = (tl.load(step_ptr + slot) + tl.sum(before, 1)) % rounds == 0
    of_slot = (inside & (r >= rows))[:, None] & (u <= TOP)
    path = tl.load(accept_row_ptr + slot[:, None] * A + u, mask=of_slot, other=-1)
    word = tl.load(sample_ptr + tl.maximum(path, 0), mask=of_slot, other=-1)
    update = tl.where((path >= 0) & due[:, None], ONE, 0)
    token = tl.where(node[:, None], token, word)
    weight = tl.where(node[:, None], weight, update)
    total = tl.where(node, total, tl.sum(update, 1))

    key = tl.where(total > 0, key, -1)
    tl.store(out_key_ptr + r, key, mask=inside)
    tl.store(out_total_ptr + r, total, mask=inside)
    tl.store(out_bit_ptr + r, bit, mask=inside)
    out = r[:, None] * (TOP + 1) + u
    written = inside[:, None] & (u <= TOP)
    tl.store(out_token_ptr + out, token, mask=written)
    tl.store(out_weight_ptr + out, weight, mask=written)
    # [BLOCK_R, BLOCK_N]
    n = tl.arange(0, BLOCK_N)[None, :]
    offsets = r[:, None] * N + n
    before = tl.load(context_ptr + offsets, mask=node[:, None] & (n < N), other=-1)
    anything = (r >= rows)[:, None] & (n == 0)
    context = tl.where(anything, ANY, before)
    tl.store(out_context_ptr + offsets, context, mask=inside[:, None] & (n < N))
    if code_ptr is not None:
        entries, keys = (entry_group_ptr, entry_hash_ptr, entry_tokens_ptr), (code_ptr, entry_ptr)
        count = rows + slots
        claim_rows(r, key, context, entries, keys, count, buckets, N, ORDERS, BLOCK_O, HASH, WAYS)


def observe_triton(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """One launch."""
    out = observed_rows(pool, slots)
    _observe_claim_kernel[(triton.cdiv(out.group_key.shape[0], BLOCK_R),)](
        **observe_arguments(pool, slots, verdict, config, out),
        BLOCK_R=BLOCK_R,
        num_warps=1,
    )
    return out


def observe_arguments(
    pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig, out: Observed
) -> dict[str, Any]:
    """Keyword arguments of the kernel, except those of the claim and the block of rows."""
    M, N = pool.context.shape
    return dict(
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        context_ptr=pool.context.contiguous(),
        group_ptr=slots.group,
        sample_index_ptr=slots.sample,
        group_key_ptr=slots.group_key,
        step_ptr=slots.step,
        sample_ptr=verdict.sample,
        top_token_ptr=verdict.top_token.contiguous(),
        top_prob_ptr=verdict.top_prob.contiguous(),
        accept_row_ptr=verdict.accept_row.contiguous(),
        out_key_ptr=out.group_key,
        out_context_ptr=out.context,
        out_token_ptr=out.succ_token,
        out_weight_ptr=out.succ_weight,
        out_total_ptr=out.row_total,
        out_bit_ptr=out.source_bit,
        rows=M,
        slots=slots.count,
        SOFT=config.soft_weight,
        HARD=config.hard_weight,
        ONE=WEIGHT_ONE,
        ANY=ANY,
        SAMPLE_BITS=SAMPLE_BITS,
        GROUP_SLOTS=GROUP_SLOTS,
        A=verdict.accept_row.shape[1],
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        TOP=TOP,
        BLOCK_U=triton.next_power_of_2(SUCCESSORS),
        BLOCK_S=BLOCK_S,
    )
