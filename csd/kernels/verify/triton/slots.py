"""Kernels of `advance_slots` and `snapshot`: a step's last two operations."""

from typing import Any

import torch
import triton
import triton.language as tl

from csd.kernels.verify.layout import empty_snapshot
from csd.state import verdict as verdicts
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

RUNNING = tl.constexpr(verdicts.RUNNING)


@triton.jit
def advance_slot(
    s,
    path,  # rows [BLOCK_A] and their samples, arbitrary from `count` on; count; finish
    logprobs,  # pointers [M]: the tokens' log-probabilities, then the model's own
    counts,  # pointers [S] int32, in and out: generated, step; bool: live
    texts,  # pointers, in and out: context [S, N] and seen [S, words], int32; penalty [S] float64
    records,  # pointers [S, tokens], out: tokens int32, and both log-probabilities
    tokens,
    words,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Appends `count` tokens to slot s and updates its other fields, in place."""
    row, token, count, finish = path
    logprob_ptr, raw_logprob_ptr = logprobs
    generated_ptr, step_ptr, live_ptr = counts
    context_ptr, seen_ptr, penalty_ptr = texts
    tokens_ptr, logprobs_ptr, raw_logprobs_ptr = records
    generated = tl.load(generated_ptr + s)
    step, live = tl.load(step_ptr + s), tl.load(live_ptr + s) != 0
    # [BLOCK_A]
    offs_a = tl.arange(0, row.shape[0])
    mask = offs_a < count
    offsets = s.to(tl.int64) * tokens + generated + offs_a
    tl.store(tokens_ptr + offsets, token, mask=mask)
    tl.store(logprobs_ptr + offsets, tl.load(logprob_ptr + row, mask=mask, other=0), mask=mask)
    raw = tl.load(raw_logprob_ptr + row, mask=mask, other=0)
    tl.store(raw_logprobs_ptr + offsets, raw, mask=mask)

    # [BLOCK_N]: the last N of old and new tokens, latest first
    offs_n = tl.arange(0, BLOCK_N)
    stays = (offs_n >= count) & (offs_n < N)
    old = tl.load(context_ptr + s * N + offs_n - count, mask=stays, other=-1)
    # [BLOCK_N, BLOCK_A]
    fresh = offs_a[None, :] == (count - 1 - offs_n)[:, None]
    new = tl.sum(tl.where(fresh, token[None, :], 0), 1)
    # all threads have read the old context before any writes
    tl.debug_barrier()
    tl.store(context_ptr + s * N + offs_n, tl.where(offs_n < count, new, old), mask=offs_n < N)

    if tl.load(penalty_ptr + s) != 1.0:
        bit = tl.full([row.shape[0]], 1, tl.int32) << (token % 32)
        # tokens may share a word
        tl.atomic_or(seen_ptr + s * words + token // 32, bit, mask=mask)
    tl.store(step_ptr + s, step + (count > 0).to(tl.int32))
    tl.store(generated_ptr + s, generated + count)
    tl.store(live_ptr + s, live & (finish == RUNNING))


@triton.jit(do_not_specialize=["tokens", "words"])
def _advance_slots_kernel(
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    sample_ptr,  # [M] int32
    logprob_ptr,
    raw_logprob_ptr,
    penalty_ptr,
    generated_ptr,
    step_ptr,
    live_ptr,
    context_ptr,
    seen_ptr,
    tokens_ptr,
    logprobs_ptr,
    raw_logprobs_ptr,
    tokens,
    words,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    s = tl.program_id(0)
    count = tl.load(accept_count_ptr + s)
    # [BLOCK_A]
    offs_a = tl.arange(0, BLOCK_A)
    mask = offs_a < count
    row = tl.load(accept_row_ptr + s * A + offs_a, mask=mask, other=0)
    token = tl.load(sample_ptr + row, mask=mask, other=-1)
    path, logprobs = (row, token, count, tl.load(finish_ptr + s)), (logprob_ptr, raw_logprob_ptr)
    counts = (generated_ptr, step_ptr, live_ptr)
    texts = (context_ptr, seen_ptr, penalty_ptr)
    records = (tokens_ptr, logprobs_ptr, raw_logprobs_ptr)
    advance_slot(s, path, logprobs, counts, texts, records, tokens, words, N, BLOCK_N)


@triton.jit
def snapshot_rows(
    me,
    nodes,  # pointers [M] int32: depth, cost, source, token, parent
    ints_ptr,  # out
    S,
    M,
    A: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the fields of BLOCK_R rows of the pool."""
    depth_ptr, cost_ptr, source_ptr, token_ptr, parent_ptr = nodes
    # offset of the optional fields, after those that are always present
    more = 4 * S + 2 * S * A + M
    r = me * BLOCK_R + tl.arange(0, BLOCK_R)
    in_pool = r < M
    cost = tl.load(cost_ptr + r, mask=in_pool, other=0)
    drafted = tl.load(depth_ptr + r, mask=in_pool, other=0) > 0
    tl.store(ints_ptr + more - M + r, tl.where(drafted, cost, -1), mask=in_pool)
    if HAS_TREES:
        ptr = ints_ptr + more + (S * A * TOP if HAS_TOP else 0) + S + r
        tl.store(ptr, tl.load(token_ptr + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(ptr + M, tl.load(parent_ptr + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(ptr + 2 * M, cost, mask=in_pool)
        tl.store(ptr + 3 * M, tl.load(source_ptr + r, mask=in_pool, other=0), mask=in_pool)


@triton.jit
def snapshot_slot(
    s,
    path,  # rows [BLOCK_A], -1 after them; their samples, arbitrary after them; count; finish
    bad,
    slots,  # pointers [S] int32: slot_start, slot_nodes
    source_ptr,  # [M] int32
    logprobs,  # pointers [M]: the tokens' log-probabilities, then the model's own
    tops,  # pointers [M, TOP]: tokens int32, probabilities float32
    ints_ptr,  # out
    floats_ptr,  # out
    S,
    M,
    A: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    """Write the fields of slot s."""
    row, token, count, finish = path
    slot_start_ptr, slot_nodes_ptr = slots
    top_token_ptr, top_prob_ptr = tops
    logprob_ptr, raw_logprob_ptr = logprobs
    more = 4 * S + 2 * S * A + M
    tl.store(ints_ptr + s, count)
    tl.store(ints_ptr + S + s, tl.load(slot_nodes_ptr + s))
    tl.store(ints_ptr + 2 * S + s, finish)
    tl.store(ints_ptr + 3 * S + s, bad.to(tl.int32))
    # [BLOCK_A]
    a = tl.arange(0, row.shape[0])
    mask, valid = a < A, a < count
    to = s * A + a
    # the next row on the path
    following = tl.sum(tl.where(a[None, :] == a[:, None] + 1, row[None, :], 0), 1)
    source = tl.load(source_ptr + following, mask=a + 1 < count, other=0)
    tl.store(ints_ptr + 4 * S + to, tl.where(valid, token, -1), mask=mask)
    tl.store(ints_ptr + 4 * S + S * A + to, source, mask=mask)
    logprob = tl.load(logprob_ptr + row, mask=valid, other=0)
    raw_logprob = tl.load(raw_logprob_ptr + row, mask=valid, other=0)
    tl.store(floats_ptr + to, logprob, mask=mask)
    tl.store(floats_ptr + S * A + to, raw_logprob, mask=mask)
    if HAS_TOP:
        # [BLOCK_A, TOP]
        t = tl.arange(0, TOP)[None, :]
        of, put = row[:, None] * TOP + t, to[:, None] * TOP + t
        here = valid[:, None] & (t < TOP)
        top_token = tl.load(top_token_ptr + of, mask=here, other=-1)
        top_prob = tl.load(top_prob_ptr + of, mask=here, other=0)
        tl.store(ints_ptr + more + put, top_token, mask=mask[:, None])
        tl.store(floats_ptr + 2 * S * A + put, top_prob, mask=mask[:, None])
    if HAS_TREES:
        trees = more + (S * A * TOP if HAS_TOP else 0)
        tl.store(ints_ptr + trees + s, tl.load(slot_start_ptr + s))
        tl.store(ints_ptr + trees + S + 4 * M + to, row, mask=mask)


@triton.jit(do_not_specialize=["S", "M"])
def _snapshot_kernel(
    slot_start_ptr,
    slot_nodes_ptr,
    depth_ptr,
    cost_ptr,
    source_ptr,
    token_ptr,
    parent_ptr,
    sample_ptr,  # [M] int32
    logprob_ptr,
    raw_logprob_ptr,
    top_token_ptr,
    top_prob_ptr,
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    bad_ptr,  # [S] bool
    ints_ptr,
    floats_ptr,
    S,
    M,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    TOP: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    me = tl.program_id(0)
    nodes = (depth_ptr, cost_ptr, source_ptr, token_ptr, parent_ptr)
    snapshot_rows(me, nodes, ints_ptr, S, M, A, TOP, HAS_TOP, HAS_TREES, BLOCK_R)
    if me >= S:
        return
    # [BLOCK_A]
    a = tl.arange(0, BLOCK_A)
    row = tl.load(accept_row_ptr + me * A + a, mask=a < A, other=-1)
    token = tl.load(sample_ptr + row, mask=row >= 0, other=-1)
    snapshot_slot(
        me,
        (row, token, tl.load(accept_count_ptr + me), tl.load(finish_ptr + me)),
        tl.load(bad_ptr + me),
        (slot_start_ptr, slot_nodes_ptr),
        source_ptr,
        (logprob_ptr, raw_logprob_ptr),
        (top_token_ptr, top_prob_ptr),
        ints_ptr,
        floats_ptr,
        S,
        M,
        A,
        TOP,
        HAS_TOP,
        HAS_TREES,
    )


def advance_slots_triton(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place, in one launch."""

    S, A = verdict.accept_row.shape
    _advance_slots_kernel[(S,)](
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        sample_ptr=verdict.sample,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        **slot_arguments(slots),
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        num_warps=1,
    )


def slot_arguments(slots: Slots) -> dict[str, Any]:
    """Keyword arguments of `advance_slot` that are fields and sizes of the slots."""

    N = slots.context.shape[1]
    return dict(
        penalty_ptr=slots.repetition_penalty,
        generated_ptr=slots.generated,
        step_ptr=slots.step,
        live_ptr=slots.live,
        context_ptr=slots.context,
        seen_ptr=slots.seen,
        tokens_ptr=slots.tokens,
        logprobs_ptr=slots.logprobs,
        raw_logprobs_ptr=slots.raw_logprobs,
        tokens=slots.tokens.shape[1],
        words=slots.seen.shape[1],
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
    )


# rows of the pool that one program copies
BLOCK_R = 64


def snapshot_triton(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""

    S, A = verdict.accept_row.shape
    out = empty_snapshot(pool, verdict, top, trees)
    _snapshot_kernel[snapshot_grid(pool, S)](
        sample_ptr=verdict.sample,
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        bad_ptr=verdict.bad,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        depth_ptr=pool.depth,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        **snapshot_arguments(pool, verdict, out, top, trees),
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        num_warps=1,
    )
    return out


def snapshot_grid(pool: Pool, S: int) -> tuple[int]:
    return (max(S, triton.cdiv(pool.token.shape[0], BLOCK_R)),)


def snapshot_arguments(
    pool: Pool,
    verdict: Verdict,
    out: tuple[torch.Tensor, torch.Tensor],
    top: bool,
    trees: bool,
) -> dict[str, Any]:
    """Arguments of `snapshot_rows` and `snapshot_slot` that the verification's kernel lacks."""
    return dict(
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        top_token_ptr=verdict.top_token,
        top_prob_ptr=verdict.top_prob,
        ints_ptr=out[0],
        floats_ptr=out[1],
        S=verdict.accept_row.shape[0],
        M=pool.token.shape[0],
        TOP=TOP,
        HAS_TOP=top,
        HAS_TREES=trees,
        BLOCK_R=BLOCK_R,
    )
