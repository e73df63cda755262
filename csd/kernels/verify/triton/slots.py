"""Kernels of `advance_slots` and `snapshot`: a step's last two operations."""

import torch
import triton
import triton.language as tl

from csd.kernels.verify.layout import empty_snapshot
from csd.kernels.verify.views import ADVANCED, COMMITTED, TREES, VERDICT
from csd.state import verdict as verdicts
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

RUNNING, TOP = tl.constexpr(verdicts.RUNNING), tl.constexpr(verdicts.TOP)


@triton.jit
def advance_slot(
    s,
    path,  # rows [BLOCK_A] and their samples, arbitrary from `count` on; count; finish
    verdict,
    slots,  # in and out
    tokens,
    words,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Appends `count` tokens to slot s and updates its other fields, in place."""
    row, token, count, finish = path
    generated = tl.load(slots.generated + s)
    step, live = tl.load(slots.step + s), tl.load(slots.live + s) != 0
    # [BLOCK_A]
    offs_a = tl.arange(0, row.shape[0])
    mask = offs_a < count
    offsets = s.to(tl.int64) * tokens + generated + offs_a
    tl.store(slots.tokens + offsets, token, mask=mask)
    tl.store(
        slots.logprobs + offsets, tl.load(verdict.logprob + row, mask=mask, other=0), mask=mask
    )
    raw = tl.load(verdict.raw_logprob + row, mask=mask, other=0)
    tl.store(slots.raw_logprobs + offsets, raw, mask=mask)

    # [BLOCK_N]: the last N of old and new tokens, latest first
    offs_n = tl.arange(0, BLOCK_N)
    stays = (offs_n >= count) & (offs_n < N)
    old = tl.load(slots.context + s * N + offs_n - count, mask=stays, other=-1)
    # [BLOCK_N, BLOCK_A]
    fresh = offs_a[None, :] == (count - 1 - offs_n)[:, None]
    new = tl.sum(tl.where(fresh, token[None, :], 0), 1)
    # all threads have read the old context before any writes
    tl.debug_barrier()
    tl.store(slots.context + s * N + offs_n, tl.where(offs_n < count, new, old), mask=offs_n < N)

    if tl.load(slots.repetition_penalty + s) != 1.0:
        bit = tl.full([row.shape[0]], 1, tl.int32) << (token % 32)
        # tokens may share a word
        tl.atomic_or(slots.seen + s * words + token // 32, bit, mask=mask)
    tl.store(slots.step + s, step + (count > 0).to(tl.int32))
    tl.store(slots.generated + s, generated + count)
    tl.store(slots.live + s, live & (finish == RUNNING))


@triton.jit(do_not_specialize=["tokens", "words"])
def advance_slots_kernel(
    verdict,
    slots,  # in and out
    tokens,
    words,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    s = tl.program_id(0)
    count = tl.load(verdict.accept_count + s)
    # [BLOCK_A]
    offs_a = tl.arange(0, BLOCK_A)
    mask = offs_a < count
    row = tl.load(verdict.accept_row + s * A + offs_a, mask=mask, other=0)
    token = tl.load(verdict.sample + row, mask=mask, other=-1)
    path = (row, token, count, tl.load(verdict.finish + s))
    advance_slot(s, path, verdict, slots, tokens, words, N, BLOCK_N)


@triton.jit
def snapshot_rows(
    me,
    pool,
    ints_ptr,  # out
    S,
    M,
    A: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the fields of BLOCK_R rows of the pool."""
    # offset of the optional fields, after those that are always present
    more = 4 * S + 2 * S * A + M
    r = me * BLOCK_R + tl.arange(0, BLOCK_R)
    in_pool = r < M
    cost = tl.load(pool.cost + r, mask=in_pool, other=0)
    drafted = tl.load(pool.depth + r, mask=in_pool, other=0) > 0
    tl.store(ints_ptr + more - M + r, tl.where(drafted, cost, -1), mask=in_pool)
    if HAS_TREES:
        ptr = ints_ptr + more + (S * A * TOP if HAS_TOP else 0) + S + r
        tl.store(ptr, tl.load(pool.token + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(ptr + M, tl.load(pool.parent + r, mask=in_pool, other=0), mask=in_pool)
        tl.store(ptr + 2 * M, cost, mask=in_pool)
        tl.store(ptr + 3 * M, tl.load(pool.source + r, mask=in_pool, other=0), mask=in_pool)


@triton.jit
def snapshot_slot(
    s,
    path,  # rows [BLOCK_A], -1 after them; their samples, arbitrary after them; count; finish
    bad,
    pool,
    verdict,
    ints_ptr,  # out
    floats_ptr,  # out
    S,
    M,
    A: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    """Write the fields of slot s."""
    row, token, count, finish = path
    more = 4 * S + 2 * S * A + M
    tl.store(ints_ptr + s, count)
    tl.store(ints_ptr + S + s, tl.load(pool.slot_nodes + s))
    tl.store(ints_ptr + 2 * S + s, finish)
    tl.store(ints_ptr + 3 * S + s, bad.to(tl.int32))
    # [BLOCK_A]
    a = tl.arange(0, row.shape[0])
    mask, valid = a < A, a < count
    to = s * A + a
    # the next row on the path
    following = tl.sum(tl.where(a[None, :] == a[:, None] + 1, row[None, :], 0), 1)
    source = tl.load(pool.source + following, mask=a + 1 < count, other=0)
    tl.store(ints_ptr + 4 * S + to, tl.where(valid, token, -1), mask=mask)
    tl.store(ints_ptr + 4 * S + S * A + to, source, mask=mask)
    logprob = tl.load(verdict.logprob + row, mask=valid, other=0)
    raw_logprob = tl.load(verdict.raw_logprob + row, mask=valid, other=0)
    tl.store(floats_ptr + to, logprob, mask=mask)
    tl.store(floats_ptr + S * A + to, raw_logprob, mask=mask)
    if HAS_TOP:
        # [BLOCK_A, TOP]
        t = tl.arange(0, TOP)[None, :]
        of, put = row[:, None] * TOP + t, to[:, None] * TOP + t
        here = valid[:, None] & (t < TOP)
        top_token = tl.load(verdict.top_token + of, mask=here, other=-1)
        top_prob = tl.load(verdict.top_prob + of, mask=here, other=0)
        tl.store(ints_ptr + more + put, top_token, mask=mask[:, None])
        tl.store(floats_ptr + 2 * S * A + put, top_prob, mask=mask[:, None])
    if HAS_TREES:
        trees = more + (S * A * TOP if HAS_TOP else 0)
        tl.store(ints_ptr + trees + s, tl.load(pool.slot_start + s))
        tl.store(ints_ptr + trees + S + 4 * M + to, row, mask=mask)


@triton.jit(do_not_specialize=["S", "M"])
def snapshot_kernel(
    pool,
    verdict,
    ints_ptr,
    floats_ptr,
    S,
    M,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HAS_TOP: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    me = tl.program_id(0)
    snapshot_rows(me, pool, ints_ptr, S, M, A, HAS_TOP, HAS_TREES, BLOCK_R)
    if me >= S:
        return
    # [BLOCK_A]
    a = tl.arange(0, BLOCK_A)
    row = tl.load(verdict.accept_row + me * A + a, mask=a < A, other=-1)
    token = tl.load(verdict.sample + row, mask=row >= 0, other=-1)
    count, finish = tl.load(verdict.accept_count + me), tl.load(verdict.finish + me)
    path, bad = (row, token, count, finish), tl.load(verdict.bad + me)
    snapshot_slot(me, path, bad, pool, verdict, ints_ptr, floats_ptr, S, M, A, HAS_TOP, HAS_TREES)


def advance_slots_triton(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place, in one launch."""

    (S, A), N = verdict.accept_row.shape, slots.context.shape[1]
    advance_slots_kernel[(S,)](
        verdict=COMMITTED(verdict),
        slots=ADVANCED(slots),
        tokens=slots.tokens.shape[1],
        words=slots.seen.shape[1],
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        num_warps=1,
    )


# rows of the pool that one program copies
BLOCK_R = 64


def snapshot_triton(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""

    S, A = verdict.accept_row.shape
    ints, floats = empty_snapshot(pool, verdict, top, trees)
    snapshot_kernel[snapshot_grid(pool, S)](
        pool=TREES(pool),
        verdict=VERDICT(verdict),
        ints_ptr=ints,
        floats_ptr=floats,
        S=S,
        M=pool.token.shape[0],
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        HAS_TOP=top,
        HAS_TREES=trees,
        BLOCK_R=BLOCK_R,
        num_warps=1,
    )
    return ints, floats


def snapshot_grid(pool: Pool, S: int) -> tuple[int]:
    return (max(S, triton.cdiv(pool.token.shape[0], BLOCK_R)),)
