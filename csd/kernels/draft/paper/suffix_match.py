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
import triton
import triton.language as tl

from csd.kernels.common.operator import Fields, RecordOperator
from csd.state.slots import Slots
from csd.state.texts import Candidates, Texts


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
    names = ("group_key", "sample", "length", "token", "chance")
    key, sample, length, text, chance = (getattr(texts, n).numpy(force=True) for n in names)
    out_token = np.full((S, most, tokens), -1, np.int32)
    out_chance = np.zeros((S, most, tokens), np.int32)
    for s in slots.live.nonzero()[:, 0].tolist():
        query = slots.context[s, :k].tolist()[::-1]
        if min(query) < 0:
            continue
        group = int(slots.group_key[slots.group[s]])
        found = []
        for row in ((key == group) & (sample != int(slots.sample[s]))).nonzero()[0].tolist():
            tokens_of = text[row, : length[row]]
            # at least one token must follow
            distance = window_distance(tokens_of[:-1], query, edits)
            found += [(distance[e], row, e) for e in (distance <= edits).nonzero()[0].tolist()]
        for i, (_, row, end) in enumerate(sorted(found)[:most]):
            stop = min(end + 1 + tokens, length[row])
            out_token[s, i, : stop - end - 1] = text[row, end + 1 : stop]
            out_chance[s, i, : stop - end - 1] = chance[row, end + 1 : stop]
    return Candidates(*(torch.from_numpy(x).to(device) for x in (out_token, out_chance)))


# larger than every distance, and small enough that distances fit 32 bits
FAR = tl.constexpr(1 << 20)


@triton.jit
def _searched(
    slot,
    row,
    live_ptr,
    group_ptr,
    slot_sample_ptr,
    context_ptr,
    group_key_ptr,
    text_key_ptr,
    text_sample_ptr,
    length_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """End of the row's places where a window for the slot may end; 0 if there are none."""
    live = tl.load(live_ptr + slot) != 0
    group = tl.load(group_ptr + slot, mask=live, other=0)
    key = tl.load(group_key_ptr + tl.maximum(group, 0))
    other = tl.load(text_sample_ptr + row) != tl.load(slot_sample_ptr + slot)
    # a sample without k tokens has no query
    oldest = tl.load(context_ptr + slot * N + K - 1)
    some = live & (tl.load(text_key_ptr + row) == key) & other & (oldest >= 0)
    return tl.where(some, tl.load(length_ptr + row) - 1, 0)


@triton.jit
def _cell(
    above,
    row,
    window,
    last,
    far,
    I: tl.constexpr,
    B: tl.constexpr,
    K: tl.constexpr,
    EDITS: tl.constexpr,
):
    """Cell (I, J) of the table; above: the band of row I - 1; row: the band of row I so far."""
    J: tl.constexpr = I + B - EDITS
    if J < 0 or J > K:
        best = far
    elif J == 0:
        best = far * 0 + I
    else:
        best = tl.where(window[J - 1] == last, above[B], above[B] + 1)
        # the last tokens are aligned with each other, so they are neither deleted nor inserted
        if not (I == K and J == K):
            if B < 2 * EDITS:
                best = tl.minimum(best, above[B + 1] + 1)
            if B > 0:
                best = tl.minimum(best, row[B - 1] + 1)
    return best


@triton.jit
def _distance(
    text_ptr,  # tokens of the row
    query_ptr,  # the slot's context, latest first
    ends,  # [BLOCK_T]
    inside,  # [BLOCK_T]
    K: tl.constexpr,
    EDITS: tl.constexpr,
):
    """[BLOCK_T] int32: D of the query and the windows that end at `ends`; above EDITS: no match.

    Element b of a band is the table's cell (i, i + b - EDITS); cells outside the table are FAR.
    """
    BAND: tl.constexpr = 2 * EDITS + 1
    far = tl.zeros_like(ends) + FAR
    window = ()
    whole = inside
    for j in tl.static_range(K):
        at = ends - (K - 1 - j)
        token = tl.load(text_ptr + at, mask=inside & (at >= 0), other=-1)
        whole = whole & (token >= 0)
        # Triton does not support unpacking a tuple into another
        window = window + (token,)  # noqa: RUF005
    if EDITS == 0:
        for i in tl.static_range(K):
            whole = whole & (window[i] == tl.load(query_ptr + (K - 1 - i)))
        return tl.where(whole, 0, far)
    band = ()
    for b in tl.static_range(BAND):
        band = band + (tl.where(b >= EDITS, far * 0 + (b - EDITS), far),)  # noqa: RUF005
    for i in tl.static_range(1, K + 1):
        # a context has the latest token first
        last = tl.load(query_ptr + (K - i))
        row = ()
        for b in tl.static_range(BAND):
            cell = _cell(band, row, window, last, far, i, b, K, EDITS)
            row = row + (cell,)  # noqa: RUF005
        band = row
    return tl.where(whole, band[EDITS], far)


@triton.jit(do_not_specialize=["text_rows", "width"])
def _count_kernel(
    live_ptr,  # [S] bool
    group_ptr,  # [S] int32
    slot_sample_ptr,  # [S] int32
    context_ptr,  # [S, N] int32
    group_key_ptr,  # [G] int64
    text_key_ptr,  # [R] int64
    text_sample_ptr,  # [R] int32
    length_ptr,  # [R] int32
    text_ptr,  # [R, W] int32
    counts_ptr,  # [S, LEVELS, R] int32, out
    text_rows,
    width,
    N: tl.constexpr,
    K: tl.constexpr,
    EDITS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    end = _searched(
        slot,
        row,
        live_ptr,
        group_ptr,
        slot_sample_ptr,
        context_ptr,
        group_key_ptr,
        text_key_ptr,
        text_sample_ptr,
        length_ptr,
        N,
        K,
    )
    level = tl.arange(0, LEVELS)
    count = tl.zeros([LEVELS], tl.int32)
    for start in range(K - 1, end, BLOCK_T):
        ends = start + tl.arange(0, BLOCK_T)
        distance = _distance(
            text_ptr + row * width, context_ptr + slot * N, ends, ends < end, K, EDITS
        )
        hit = (distance[:, None] == level[None, :]) & (level <= EDITS)[None, :]
        count += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts_ptr + (slot * LEVELS + level) * text_rows + row, count)


@triton.jit(do_not_specialize=["text_rows", "width"])
def _take_kernel(
    chance_ptr,  # [R, W] int32
    out_token_ptr,  # [S, P, L] int32, out
    out_chance_ptr,  # [S, P, L] int32, out
    live_ptr,
    group_ptr,
    slot_sample_ptr,
    context_ptr,
    group_key_ptr,
    text_key_ptr,
    text_sample_ptr,
    length_ptr,
    text_ptr,
    counts_ptr,
    text_rows,
    width,
    N: tl.constexpr,
    K: tl.constexpr,
    EDITS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    level, offs_l = tl.arange(0, LEVELS), tl.arange(0, BLOCK_L)
    own = tl.load(counts_ptr + (slot * LEVELS + level) * text_rows + row)
    # the program of row 0 also writes the places that no match fills
    if (tl.sum(own, 0) == 0) & (row > 0):
        return
    # [LEVELS]: matches of the slot, and those in earlier rows
    total, before = tl.zeros([LEVELS], tl.int32), tl.zeros([LEVELS], tl.int32)
    for start in range(0, text_rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        at = counts_ptr + (slot * LEVELS + level)[:, None] * text_rows + r[None, :]
        count = tl.load(at, mask=(r < text_rows)[None, :], other=0)
        total += tl.sum(count, 1)
        before += tl.sum(tl.where((r < row)[None, :], count, 0), 1)
    # smaller distances first
    place = tl.cumsum(total, 0) - total + before
    out = slot * P
    if row == 0:
        offs_p = tl.arange(0, BLOCK_P)
        none = (offs_p >= tl.sum(total, 0)) & (offs_p < P)
        at = (out + offs_p)[:, None] * L + offs_l[None, :]
        mask = none[:, None] & (offs_l < L)[None, :]
        absent = tl.zeros([BLOCK_P, BLOCK_L], tl.int32)
        tl.store(out_token_ptr + at, absent - 1, mask=mask)
        tl.store(out_chance_ptr + at, absent, mask=mask)
    length = tl.load(length_ptr + row)
    end = tl.where(tl.sum(own, 0) > 0, length - 1, 0)
    for start in range(K - 1, end, BLOCK_T):
        ends = start + tl.arange(0, BLOCK_T)
        distance = _distance(
            text_ptr + row * width, context_ptr + slot * N, ends, ends < end, K, EDITS
        )
        # [BLOCK_T]; one scan per distance, because Triton 3.6 compiles no scan over few columns
        to = tl.zeros([BLOCK_T], tl.int32)
        for near in tl.static_range(EDITS + 1):
            hit = (distance == near).to(tl.int32)
            first = tl.sum(tl.where(level == near, place, 0), 0)
            to += hit * (first + tl.cumsum(hit, 0) - 1)
            place += tl.where(level == near, tl.sum(hit, 0), 0)
        taken = (distance <= EDITS) & (to < P)
        # [BLOCK_T, BLOCK_L]
        source = ends[:, None] + 1 + offs_l[None, :]
        written = taken[:, None] & (offs_l < L)[None, :]
        read = written & (source < length)
        token = tl.load(text_ptr + row * width + source, mask=read, other=-1)
        chance = tl.load(chance_ptr + row * width + source, mask=read, other=0)
        at = (out + to)[:, None] * L + offs_l[None, :]
        tl.store(out_token_ptr + at, token, mask=written)
        tl.store(out_chance_ptr + at, chance, mask=written)


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
        Fields("texts"),
        Fields("slots", _SLOTS),
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
