"""Append a step's committed tokens to their slots and advance the slots.

For slot s with c = accept_count[s] and committed tokens y_0 .. y_{c-1}:

    tokens[s, generated + i] = y_i, likewise both log-probabilities
    context[s] = the last N of (context, y), latest first
    seen[s] |= bits of y where the slot has a penalty
    generated += c,  step += 1,  live &= finish is RUNNING

All tensors are updated in place; a slot without rows in the pool does not change.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from csd.kernels.common.operator import Fields, RecordOperator
from csd.state import verdict as verdicts
from csd.state.slots import Slots
from csd.state.verdict import Verdict

RUNNING = tl.constexpr(verdicts.RUNNING)


def advance_slots_ref(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place."""
    row = verdict.accept_row.clamp(min=0).long()
    count = verdict.accept_count.long()[:, None]
    place = torch.arange(row.shape[1], device=row.device)[None, :]
    accepted = place < count
    # [S, A]
    token = torch.where(accepted, verdict.sample[row], -1)

    generated = slots.generated.long()[:, None]
    target = (generated + place).clamp(max=slots.tokens.shape[1] - 1)
    s, a = accepted.nonzero(as_tuple=True)
    slots.tokens[s, target[s, a]] = token[s, a]
    slots.logprobs[s, target[s, a]] = verdict.logprob[row][s, a].to(slots.logprobs.dtype)
    slots.raw_logprobs[s, target[s, a]] = verdict.raw_logprob[row][s, a].to(slots.logprobs.dtype)

    offset = torch.arange(slots.context.shape[1], device=row.device)[None, :]
    fresh = token.gather(1, (count - 1 - offset).clamp(min=0, max=row.shape[1] - 1))
    old = slots.context.gather(1, (offset - count).clamp(min=0))
    slots.context.copy_(torch.where(offset < count, fresh, old))

    penalised = slots.repetition_penalty != 1
    if bool(penalised.any()):
        mark_seen(slots.seen, torch.where(penalised[:, None], token, -1))
    slots.step += (count[:, 0] > 0).int()
    slots.generated += verdict.accept_count
    slots.live &= verdict.finish == verdicts.RUNNING


def mark_seen(seen: torch.Tensor, token: torch.Tensor) -> None:
    """Set the bits of token [S, A] (-1 is none) in the bitmaps seen [S, ceil(V / 32)], in place."""
    for t in token.long().unbind(1):
        word = (t.clamp(min=0) // 32)[:, None]
        bit = torch.where(t >= 0, 1 << (t.clamp(min=0) % 32), 0)[:, None]
        # the sign bit of an int32 is bit 31: int64 keeps it positive until the cast wraps it
        seen.scatter_(1, word, (seen.gather(1, word).long() | bit).int())


@triton.jit
def advance_slot(
    s,
    row,  # [BLOCK_A]: the path's rows, arbitrary from index `count` on
    token,  # [BLOCK_A]: their samples, arbitrary from index `count` on
    count,
    finish,
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
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Appends `count` tokens to slot s and updates its other fields, in place."""
    generated = tl.load(generated_ptr + s)
    step, live = tl.load(step_ptr + s), tl.load(live_ptr + s) != 0
    # [BLOCK_A]
    offs_a = tl.arange(0, row.shape[0])
    mask = offs_a < count
    at = s.to(tl.int64) * tokens + generated + offs_a
    tl.store(tokens_ptr + at, token, mask=mask)
    tl.store(logprobs_ptr + at, tl.load(logprob_ptr + row, mask=mask, other=0), mask=mask)
    raw = tl.load(raw_logprob_ptr + row, mask=mask, other=0)
    tl.store(raw_logprobs_ptr + at, raw, mask=mask)

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
    advance_slot(
        s,
        row,
        token,
        count,
        tl.load(finish_ptr + s),
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
        N,
        BLOCK_N,
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


_WRITTEN = ("live", "generated", "context", "step", "tokens", "logprobs", "raw_logprobs", "seen")
_READ = ("sample", "logprob", "raw_logprob", "accept_row", "accept_count", "finish")
_advance_slots = RecordOperator(
    "advance_slots",
    (
        Fields("slots", (*_WRITTEN, "repetition_penalty"), written=_WRITTEN),
        Fields("verdict", _READ),
    ),
    advance_slots_ref,
    advance_slots_triton,
)


def advance_slots(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place."""
    _advance_slots.check({"S": slots.count}, slots.live.device, slots, verdict)
    if verdict.logprob.dtype != slots.logprobs.dtype and verdict.logprob.is_cuda:
        raise ValueError(
            f"verdict.logprob must be {slots.logprobs.dtype}, got {verdict.logprob.dtype}"
        )
    _advance_slots(slots, verdict)
