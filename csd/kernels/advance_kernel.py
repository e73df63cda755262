"""Move one slot on a program: the kernel of `csd/kernels/advance.py`."""

import triton
import triton.language as tl

from csd import verdict

RUNNING = tl.constexpr(verdict.RUNNING)


@triton.jit(do_not_specialize=["tokens", "words"])
def _advance_slots_kernel(
    accept_row_ptr,  # [S, A] int32
    accept_count_ptr,  # [S] int32
    finish_ptr,  # [S] int32
    sample_ptr,  # [M] int32
    logprob_ptr,  # [M]
    raw_logprob_ptr,  # [M]
    penalty_ptr,  # [S] float64
    generated_ptr,  # [S] int32, in and out
    step_ptr,  # [S] int32, in and out
    live_ptr,  # [S] bool, in and out
    context_ptr,  # [S, N] int32, in and out
    seen_ptr,  # [S, words] int32, in and out
    tokens_ptr,  # [S, tokens] int32, out
    logprobs_ptr,  # [S, tokens], out
    raw_logprobs_ptr,  # [S, tokens], out
    tokens,
    words,
    A: tl.constexpr,
    BLOCK_A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    s = tl.program_id(0)
    count = tl.load(accept_count_ptr + s)
    generated = tl.load(generated_ptr + s)
    # [BLOCK_A]
    offs_a = tl.arange(0, BLOCK_A)
    mask = offs_a < count
    row = tl.load(accept_row_ptr + s * A + offs_a, mask=mask, other=0)
    token = tl.load(sample_ptr + row, mask=mask, other=-1)
    at = s.to(tl.int64) * tokens + generated + offs_a
    tl.store(tokens_ptr + at, token, mask=mask)
    tl.store(logprobs_ptr + at, tl.load(logprob_ptr + row, mask=mask, other=0), mask=mask)
    raw = tl.load(raw_logprob_ptr + row, mask=mask, other=0)
    tl.store(raw_logprobs_ptr + at, raw, mask=mask)

    # [BLOCK_N]: the last of old and new, latest first
    offs_n = tl.arange(0, BLOCK_N)
    kept = (offs_n >= count) & (offs_n < N)
    old = tl.load(context_ptr + s * N + offs_n - count, mask=kept, other=-1)
    # [BLOCK_N, BLOCK_A]
    fresh = offs_a[None, :] == (count - 1 - offs_n)[:, None]
    new = tl.sum(tl.where(fresh, token[None, :], 0), 1)
    # every thread has read before any writes
    tl.debug_barrier()
    tl.store(context_ptr + s * N + offs_n, tl.where(offs_n < count, new, old), mask=offs_n < N)

    if tl.load(penalty_ptr + s) != 1.0:
        bit = tl.full([BLOCK_A], 1, tl.int32) << (token % 32)
        # tokens may share a word
        tl.atomic_or(seen_ptr + s * words + token // 32, bit, mask=mask)
    tl.store(step_ptr + s, tl.load(step_ptr + s) + (count > 0).to(tl.int32))
    tl.store(generated_ptr + s, generated + count)
    running = tl.load(finish_ptr + s) == RUNNING
    tl.store(live_ptr + s, (tl.load(live_ptr + s) != 0) & running)
