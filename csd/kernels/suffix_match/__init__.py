"""Occurrences of a sample's last k tokens in its siblings' texts, and the tokens after them.

The query of slot s is its last k tokens; a window is k tokens of another sample's text in the same
group, with at least one token after it. With d the edit distance (insertions, deletions and
substitutions cost 1) and q', w' all but the last token of query and window:

    D(q, w) = d(q', w') + [last of q is not last of w]

so that a window ends where the query ends. Every window with D <= edits is a match; its candidate
is the up to L tokens after it, each with the probability with which the target drew it. A slot
keeps at most P candidates: the smallest D first, then by row of the texts, then by place.

D is computed in a band of the table of edit distances: only cells (i, j) with |i - j| <= edits can
matter.

Li et al., "Speculative decoding for multi-sample inference", 2503.05330: the pool C_t of candidate
continuations with fuzzy suffix matching.
"""

from typing import Any

import torch
import triton

from csd.kernels.suffix_match.kernel import _count_kernel, _take_kernel
from csd.kernels.suffix_match.reference import match_ends, suffix_match_ref
from csd.kernels.torch_operators import Fields, RecordOperator
from csd.state.slots import Slots
from csd.state.texts import Candidates, Texts

__all__ = ["match_ends", "suffix_match", "suffix_match_ref", "suffix_match_triton"]

# places of a text compared at once, rows whose counts are summed at once
BLOCK_T, BLOCK_R = 256, 256
COUNT_WARPS, TAKE_WARPS = 2, 4


def _empty(S: int, P: int, L: int, device: torch.device) -> Candidates:
    shape = (S, P, L)
    return Candidates(
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


def suffix_match_triton(
    texts: Texts, slots: Slots, k: int, edits: int, most: int, tokens: int
) -> Candidates:
    """Two launches: the first counts matches, the second computes places from the counts."""
    S, N, R = slots.count, slots.context.shape[1], texts.token.shape[0]
    device = slots.live.device
    levels = triton.next_power_of_2(edits + 1)
    counts = torch.empty((S, levels, R), dtype=torch.int32, device=device)
    out = _empty(S, most, tokens, device)
    shared = dict(
        live_ptr=slots.live,
        group_ptr=slots.group,
        slot_sample_ptr=slots.sample,
        context_ptr=slots.context,
        group_key_ptr=slots.group_key,
        text_key_ptr=texts.group_key,
        text_sample_ptr=texts.sample,
        length_ptr=texts.length,
        text_ptr=texts.token,
        counts_ptr=counts,
        text_rows=R,
        width=texts.token.shape[1],
        N=N,
        K=k,
        EDITS=edits,
        LEVELS=levels,
        BLOCK_T=BLOCK_T,
    )
    _count_kernel[(S, R)](**shared, num_warps=COUNT_WARPS)
    _take_kernel[(S, R)](
        chance_ptr=texts.chance,
        out_token_ptr=out.token,
        out_chance_ptr=out.chance,
        **shared,
        P=most,
        BLOCK_P=triton.next_power_of_2(most),
        L=tokens,
        BLOCK_L=triton.next_power_of_2(tokens),
        BLOCK_R=BLOCK_R,
        num_warps=TAKE_WARPS,
    )
    return out


_SLOTS = ("live", "group", "sample", "context", "group_key")


def _fake(texts: Any, slots: Any, k: int, edits: int, most: int, tokens: int) -> Candidates:
    return _empty(slots.count, most, tokens, slots.live.device)


_suffix_match = RecordOperator(
    "suffix_match",
    (
        Fields("texts"), Fields("slots", _SLOTS),
        "SymInt k", "SymInt edits", "SymInt most", "SymInt tokens",
    ),
    suffix_match_ref,
    suffix_match_triton,
    returns=Candidates,
    fake=_fake,
)  # fmt: skip


def suffix_match(
    texts: Texts, slots: Slots, k: int, edits: int, most: int, tokens: int
) -> Candidates:
    """Returns at most `most` candidates of at most `tokens` tokens for every live slot.

    k: tokens of the query, 1 to N, the length of the slots' context. edits: 0 to k - 1.
    """
    sizes = {"S": slots.count}
    _suffix_match.check(sizes, slots.live.device, texts, slots)
    if not 1 <= k <= sizes["N"]:
        raise ValueError(
            f"k must be from 1 to {sizes['N']}, the length of the slots' context, got {k}"
        )
    if not 0 <= edits < k:
        raise ValueError(f"edits must be from 0 to {k - 1}, got {edits}")
    for name, value in (("most", most), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return _suffix_match(texts, slots, k, edits, most, tokens)
