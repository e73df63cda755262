"""The kernels of `csd/kernels/suffix_match/`: a program compares one slot with one row of texts."""

import triton
import triton.language as tl

# larger than every distance, and small enough that distances fit 32 bits
FAR = tl.constexpr(1 << 20)


@triton.jit
def _searched(
    slot, row, live_ptr, group_ptr, slot_sample_ptr, context_ptr, group_key_ptr, text_key_ptr,
    text_sample_ptr, length_ptr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
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
def _cell(above, row, window, last, far, I: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
          EDITS: tl.constexpr):  # fmt: skip
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
        slot, row, live_ptr, group_ptr, slot_sample_ptr, context_ptr, group_key_ptr, text_key_ptr,
        text_sample_ptr, length_ptr, N, K,
    )  # fmt: skip
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
