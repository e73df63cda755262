"""Occurrences of a sample's last k tokens in its siblings' texts, and the tokens after them.

The query of slot s is its last k tokens; a window is k tokens of another sample's text in the same
group, with at least one token after it. With d the edit distance (insertions, deletions and
substitutions cost 1) and q', w' all but the last token of query and window:

    D(q, w) = d(q', w') + [last of q is not last of w]

so that a window ends where the query ends. Every window with D <= edits is a match; its candidate
is the up to L tokens after it, each with the probability with which the target drew it. A slot
keeps at most P candidates: the smallest D first, then by row of the texts, then by place.

D is computed in a band of the table of edit distances: only cells (i, j) with |i - j| <= edits can
matter. The reference is in numpy. A program of the two kernels compares one slot with one row of
texts: the first kernel counts matches, the second places their candidates.

Li et al., "Speculative decoding for multi-sample inference", 2503.05330: the pool C_t of candidate
continuations with fuzzy suffix matching.
"""

from typing import Any

import numpy as np
import torch

from csd.kernels.common.operator import RecordOperator
from csd.state.record import View, allocate
from csd.state.slots import Slots
from csd.state.texts import Candidates, SlotTexts


def window_distance(text: np.ndarray, query: list[int], edits: int) -> np.ndarray:
    """[T] int: D of the query and the window that ends at each place of `text` [T].

    A value above `edits` means no match: D is larger, the text is too short, or the window has a
    gap (-1). The table is filled for all windows at once, in a band.
    """
    T, k = text.shape[0], len(query)
    if not T:
        return np.zeros(0, int)
    padded = np.concatenate([np.full(k - 1, -1), text])
    # [T, k]: column j is the window's token j
    token = np.lib.stride_tricks.sliding_window_view(padded, k)
    # distance[i, j]: of the query's first i tokens and the window's first j, |i - j| <= edits
    distance = {(0, j): np.full(T, j) for j in range(edits + 1)}
    distance |= {(i, 0): np.full(T, i) for i in range(1, edits + 1)}
    for i in range(1, k + 1):
        for j in range(max(1, i - edits), min(k, i + edits) + 1):
            best = distance[i - 1, j - 1] + (token[:, j - 1] != query[i - 1])
            # deleted from the query, inserted into the window; the last tokens are aligned
            for before in ((i - 1, j), (i, j - 1)):
                if before in distance and not i == j == k:
                    best = np.minimum(best, distance[before] + 1)
            distance[i, j] = best
    return np.where((token >= 0).all(1), distance[k, k], edits + 1)


def match_ends(text: np.ndarray, query: list[int], edits: int) -> np.ndarray:
    """[T] bool: True where a window of `text` [T] within `edits` edits of the query ends."""
    return window_distance(text, query, edits) <= edits


def suffix_match_ref(
    texts: Any,  # csd.state.texts.Texts
    slots: Any,  # csd.state.slots.Slots
    k: int,
    edits: int,
    most: int,
    tokens: int,
) -> Candidates:
    """Returns the candidates of every live slot, filled up with tokens -1 and chances 0."""
    S, device = slots.count, slots.live.device
    key, sample, length, text, chance = TEXTS.arrays(texts)
    out_token = np.full((S, most, tokens), -1, np.int32)
    out_chance = np.zeros((S, most, tokens), np.int32)
    for s in slots.live.nonzero()[:, 0].tolist():
        query = slots.context[s, :k].tolist()[::-1]
        if min(query) < 0:
            continue
        group = int(slots.group_key[slots.group[s]])
        candidates = []
        for row in ((key == group) & (sample != int(slots.sample[s]))).nonzero()[0].tolist():
            tokens_of = text[row, : length[row]]
            # at least one token must follow
            distance = window_distance(tokens_of[:-1], query, edits)
            candidates += [(distance[e], row, e) for e in (distance <= edits).nonzero()[0].tolist()]
        for i, (_, row, end) in enumerate(sorted(candidates)[:most]):
            stop = min(end + 1 + tokens, length[row])
            out_token[s, i, : stop - end - 1] = text[row, end + 1 : stop]
            out_chance[s, i, : stop - end - 1] = chance[row, end + 1 : stop]
    return Candidates(*(torch.from_numpy(x).to(device) for x in (out_token, out_chance)))


TEXTS = View(SlotTexts, "group_key sample length token chance")
SLOTS = View(Slots, "live group sample context group_key")
# places of a text compared at once, rows whose counts are summed at once
BLOCK_T, BLOCK_R = 256, 256
COUNT_WARPS, TAKE_WARPS = 2, 4


def _empty(S: int, P: int, L: int, device: torch.device) -> Candidates:
    return Candidates(**allocate(Candidates, {"S": S, "P": P, "L": L}, device))


def suffix_match_triton(
    texts: SlotTexts, slots: Slots, k: int, edits: int, most: int, tokens: int
) -> Candidates:
    """Two launches: the first counts matches, the second computes places from the counts."""

    import triton

    from csd.kernels.draft.paper.triton import TextSearch, count_kernel, take_kernel

    S, N, R = slots.count, slots.context.shape[1], texts.token.shape[0]
    device = slots.live.device
    levels = triton.next_power_of_2(edits + 1)
    counts = torch.empty((S, levels, R), dtype=torch.int32, device=device)
    out = _empty(S, most, tokens, device)
    shared: dict[str, Any] = dict(
        slots=SLOTS(slots),
        texts=TEXTS(texts),
        counts_ptr=counts,
        text_rows=R,
        width=texts.token.shape[1],
        C=TextSearch(N=N, K=k, EDITS=edits, LEVELS=levels, BLOCK_T=BLOCK_T),
    )
    count_kernel[(S, R)](**shared, num_warps=COUNT_WARPS)
    take_kernel[(S, R)](
        **shared,
        out=out,
        P=most,
        BLOCK_P=triton.next_power_of_2(most),
        L=tokens,
        BLOCK_L=triton.next_power_of_2(tokens),
        BLOCK_R=BLOCK_R,
        num_warps=TAKE_WARPS,
    )
    return out


def _fake(texts: Any, slots: Any, k: int, edits: int, most: int, tokens: int) -> Candidates:
    return _empty(slots.count, most, tokens, slots.live.device)


_suffix_match = RecordOperator(
    "suffix_match",
    (
        TEXTS,
        SLOTS,
        "SymInt k",
        "SymInt edits",
        "SymInt most",
        "SymInt tokens",
    ),
    suffix_match_ref,
    suffix_match_triton,
    returns=Candidates,
    fake=_fake,
)


def suffix_match(
    texts: SlotTexts, slots: Slots, k: int, edits: int, most: int, tokens: int
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
