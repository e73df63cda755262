"""Append a step's committed tokens to their slots and advance the slots.

For slot s with c = accept_count[s] and committed tokens y_0 .. y_{c-1}:

    tokens[s, generated + i] = y_i, likewise both log-probabilities
    context[s] = the last N of (context, y), latest first
    seen[s] |= bits of y where the slot has a penalty
    generated += c,  step += 1,  live &= finish is RUNNING

All tensors are updated in place; a slot without rows in the pool does not change.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.operator import RecordOperator, launcher
from csd.kernels.verify.views import ADVANCED, COMMITTED
from csd.state import verdict as verdicts
from csd.state.slots import Slots
from csd.state.verdict import Verdict


@launcher
def advance_slots_triton() -> Callable:
    from csd.kernels.verify.triton.slots import advance_slots_triton

    return advance_slots_triton


def advance_slots_ref(slots: Slots, verdict: Verdict) -> None:
    """Apply `verdict` to `slots` in place."""
    row = verdict.accept_row.clamp(min=0).long()
    count = verdict.accept_count.long()[:, None]
    index = torch.arange(row.shape[1], device=row.device)[None, :]
    accepted = index < count
    # [S, A]
    token = torch.where(accepted, verdict.sample[row], -1)

    generated = slots.generated.long()[:, None]
    target = (generated + index).clamp(max=slots.tokens.shape[1] - 1)
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


_advance_slots = RecordOperator(
    "advance_slots",
    (ADVANCED, COMMITTED),
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
