"""Append a step's committed tokens to their slots and move the slots on.

For slot s with c = accept_count[s] and committed tokens y_0 .. y_{c-1}:

    tokens[s, generated + i] = y_i, likewise both log-probabilities
    context[s] = the last N of (context, y), latest first
    seen[s] |= bits of y where the slot has a penalty
    generated += c,  step += 1,  live &= finish is RUNNING

All in place; a slot without rows in the pool stays as it is.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton

from csd.kernels.advance_kernel import _advance_slots_kernel
from csd.kernels.aot import Job, Shape
from csd.kernels.checks import check_fields
from csd.pool import MAX_DEPTH
from csd.slots import Slots
from csd.verdict import RUNNING, Verdict


def advance_slots_ref(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place."""
    row = verdict.accept_row.clamp(min=0).long()
    count = verdict.accept_count.long()[:, None]
    place = torch.arange(row.shape[1], device=row.device)[None, :]
    kept = place < count
    # [S, A]
    token = torch.where(kept, verdict.sample[row], -1)

    generated = slots.generated.long()[:, None]
    target = (generated + place).clamp(max=slots.tokens.shape[1] - 1)
    s, a = kept.nonzero(as_tuple=True)
    slots.tokens[s, target[s, a]] = token[s, a]
    slots.logprobs[s, target[s, a]] = verdict.logprob[row][s, a].to(slots.logprobs.dtype)
    slots.raw_logprobs[s, target[s, a]] = verdict.raw_logprob[row][s, a].to(slots.logprobs.dtype)

    offset = torch.arange(slots.context.shape[1], device=row.device)[None, :]
    fresh = token.gather(1, (count - 1 - offset).clamp(min=0, max=row.shape[1] - 1))
    old = slots.context.gather(1, (offset - count).clamp(min=0))
    slots.context.copy_(torch.where(offset < count, fresh, old))

    penalised = slots.penalty != 1
    if bool(penalised.any()):
        mark_seen(slots.seen, torch.where(penalised[:, None], token, -1))
    slots.step += (count[:, 0] > 0).int()
    slots.generated += verdict.accept_count
    slots.live &= verdict.finish == RUNNING


def mark_seen(seen: torch.Tensor, token: torch.Tensor) -> None:
    """Set the bits of token [S, A] (-1 is none) in the bitmaps seen [S, ceil(V / 32)], in place."""
    for t in token.long().unbind(1):
        word = (t.clamp(min=0) // 32)[:, None]
        bit = torch.where(t >= 0, 1 << (t.clamp(min=0) % 32), 0)[:, None]
        # the sign bit of an int32 is bit 31: int64 keeps it positive until the cast wraps it
        seen.scatter_(1, word, (seen.gather(1, word).long() | bit).int())


def advance_slots_triton(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place, in one launch."""
    S, A = verdict.accept_row.shape
    N = slots.context.shape[1]
    _advance_slots_kernel[(S,)](
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        sample_ptr=verdict.sample,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        penalty_ptr=slots.penalty,
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
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        num_warps=1,
    )


_WRITTEN = ("live", "generated", "context", "step", "tokens", "logprobs", "raw_logprobs", "seen")
_READ = ("sample", "logprob", "raw_logprob", "accept_row", "accept_count", "finish")


@torch.library.custom_op(
    "csd::advance_slots", mutates_args=_WRITTEN, device_types="cpu"
)
def _advance_slots(
    live: torch.Tensor,
    generated: torch.Tensor,
    context: torch.Tensor,
    step: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    raw_logprobs: torch.Tensor,
    seen: torch.Tensor,
    penalty: torch.Tensor,
    verdict: list[torch.Tensor],
) -> None:
    written = (live, generated, context, step, tokens, logprobs, raw_logprobs, seen)
    _run(advance_slots_ref, *written, penalty, verdict)


@_advance_slots.register_kernel("cuda")
def _(live: torch.Tensor, *args: Any) -> None:
    with torch.cuda.device_of(live):
        _run(advance_slots_triton, live, *args)


@_advance_slots.register_fake
def _(*args: Any) -> Any:
    return None


def _run(run: Callable, *args: Any) -> None:
    *slots, verdict = args
    state = dict(zip((*_WRITTEN, "penalty"), slots, strict=True))
    run(SimpleNamespace(**state), SimpleNamespace(**dict(zip(_READ, verdict, strict=True))))


def advance_slots(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place."""
    sizes, device = {"S": slots.count}, slots.live.device
    check_fields("slots", slots, (*_WRITTEN, "penalty"), sizes, device)
    check_fields("verdict", verdict, _READ, sizes, device)
    if verdict.logprob.dtype != slots.logprobs.dtype and verdict.logprob.is_cuda:
        raise ValueError(
            f"verdict.logprob must be {slots.logprobs.dtype}, got {verdict.logprob.dtype}"
        )
    written = [getattr(slots, name) for name in _WRITTEN]
    _advance_slots(*written, slots.penalty, [getattr(verdict, name) for name in _READ])


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    jobs = []
    for N in (4, 8):
        types = {name: "*fp32:16" for name in (
            "logprob", "raw_logprob", "logprobs", "raw_logprobs",
        )}  # fmt: skip
        types |= {"penalty": "*fp64:16", "live": "*u1:16", "tokens": "i32", "words": "i32"}
        A = MAX_DEPTH + 1
        constants = dict(A=A, BLOCK_A=triton.next_power_of_2(A), N=N, BLOCK_N=N)
        args = {}
        for param in _advance_slots_kernel.params:
            name = param.name.removesuffix("_ptr")
            kind = types.get(name, "*i32:16")
            if param.name == "tokens_ptr":
                kind = "*i32:16"
            args[param.name] = constants[name] if param.is_constexpr else kind
        job = Job(name=f"advance_slots N={N}", kernel=_advance_slots_kernel, args=args, num_warps=1)
        jobs.append(job)
    return jobs
