"""The kernel of the exact attention's work list (`csd/kernels/exact_attention/plan.py`).

Every row works out for itself which tiles it is in and where their segments lie in the list; the
first row of a tile writes the tile's segments.
"""

import triton
import triton.language as tl


@triton.jit
def _put_segments(
    segment_ptr, at, first, last, tile, source, pages, step, cut, row, M,
    EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Segments of the tile that begins at `row`, if one does, from number `at` on."""
    count = tl.where(row == tile, tl.cdiv(pages, step), 0)
    for i in range(0, count, BLOCK):
        # [BLOCK]
        c = i + tl.arange(0, BLOCK)
        mask = c < count
        to = segment_ptr + (at + c) * 6
        tl.store(to, tile + 0 * c, mask=mask)
        tl.store(to + 1, tl.minimum(last - tile, ROWS) + 0 * c, mask=mask)
        tl.store(to + 2, source + 0 * c, mask=mask)
        tl.store(to + 3, c * step, mask=mask)
        tl.store(to + 4, tl.minimum((c + 1) * step, pages), mask=mask)
        tl.store(to + 5, ((cut + c) * M + tile) * EACH, mask=mask)


@triton.jit(do_not_specialize=["M", "S", "G", "slot_width", "prompt_cuts"])
def _plan_exact_kernel(
    prompt_len_ptr,  # [G] int32
    slot_len_ptr,  # [S] int32
    slot_pages_ptr,  # [S, SP] int32
    slot_ptr,  # [M] int32
    ancestors_ptr,  # [M] int64
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    group_start_ptr,  # [G + 1] int32
    segment_ptr,  # [W, 6] int32
    count_ptr,  # [1] int32
    row_ptr,  # [M, 4] int32
    tail_ptr,  # [M, TAIL] int32
    M,
    S,
    G,
    slot_width,
    prompt_cuts,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    NEAR: tl.constexpr,
    TAIL: tl.constexpr,
    PROMPT_PAGES: tl.constexpr,
    PROMPT_CUTS: tl.constexpr,
    SLOT_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    live = slot >= 0
    committed = tl.load(slot_len_ptr + slot, mask=live, other=0)
    start = tl.load(slot_start_ptr + slot, mask=live, other=0)
    nodes = tl.load(slot_nodes_ptr + slot, mask=live, other=0)

    # a sum over all groups and slots a row is cheaper than a launch for their prefix sums
    group = tl.zeros((), tl.int32)
    group_first = tl.zeros((), tl.int32)
    group_last = tl.zeros((), tl.int32)
    group_pages = tl.zeros((), tl.int32)
    group_before = tl.zeros((), tl.int32)
    total = tl.zeros((), tl.int32)
    for z in range(0, G, BLOCK):
        # [BLOCK]
        g = z + tl.arange(0, BLOCK)
        first = tl.load(group_start_ptr + g, mask=g < G, other=0)
        last = tl.load(group_start_ptr + g + 1, mask=g < G, other=0)
        pages = tl.cdiv(tl.load(prompt_len_ptr + g, mask=g < G, other=0), PAGE)
        step = tl.maximum(PROMPT_PAGES, tl.cdiv(pages, PROMPT_CUTS))
        segments = tl.cdiv(last - first, ROWS) * tl.cdiv(pages, step)
        mine = (first <= row) & (row < last)
        group += tl.sum(tl.where(mine, g, 0), 0)
        group_first += tl.sum(tl.where(mine, first, 0), 0)
        group_last += tl.sum(tl.where(mine, last, 0), 0)
        group_pages += tl.sum(tl.where(mine, pages, 0), 0)
        group_before += tl.sum(tl.where(last <= row, segments, 0), 0)
        total += tl.sum(segments, 0)
    slot_before = total
    for z in range(0, S, BLOCK):
        # [BLOCK]
        s = z + tl.arange(0, BLOCK)
        first = tl.load(slot_start_ptr + s, mask=s < S, other=0)
        tiles = tl.cdiv(tl.load(slot_nodes_ptr + s, mask=s < S, other=0), ROWS)
        pages = tl.load(slot_len_ptr + s, mask=s < S, other=0) // PAGE
        segments = tiles * tl.cdiv(pages, SLOT_PAGES)
        slot_before += tl.sum(tl.where(first < start, segments, 0), 0)
        total += tl.sum(segments, 0)
    if row == 0:
        tl.store(count_ptr, total)

    # [64]
    b = tl.arange(0, 64)
    bit = ((tl.load(ancestors_ptr + row) >> b.to(tl.int64)) & 1).to(tl.int32)
    depth = tl.sum(bit, 0)
    below = tl.maximum(committed + depth - NEAR, 0) // PAGE * PAGE
    step = tl.maximum(PROMPT_PAGES, tl.cdiv(group_pages, PROMPT_CUTS))
    # [4]
    i = tl.arange(0, 4)
    cut = tl.where(i == 0, tl.cdiv(group_pages, step), tl.cdiv(below, PAGE * SLOT_PAGES))
    found = tl.where(i < 2, cut, tl.where(i == 2, below, committed + depth - below))
    tl.store(row_ptr + row * 4 + i, tl.where(live, found, 0))

    # [128]
    t = tl.arange(0, 128)
    token = below + t
    old = live & (t < TAIL) & (token < committed)
    page = tl.load(slot_pages_ptr + slot.to(tl.int64) * slot_width + token // PAGE, mask=old)
    tail = tail_ptr + row.to(tl.int64) * TAIL
    tl.store(tail + t, page * PAGE + token % PAGE, mask=old)
    at = committed - below + tl.cumsum(bit, 0) - 1
    tl.store(tail + at, -2 - (start + b), mask=live & (bit == 1) & (at >= 0) & (at < TAIL))

    tile = group_first + (row - group_first) // ROWS * ROWS
    at = group_before + (tile - group_first) // ROWS * tl.cdiv(group_pages, step)
    if live:
        _put_segments(
            segment_ptr, at, group_first, group_last, tile, group, group_pages, step, 0, row, M,
            EACH, ROWS, BLOCK,
        )  # fmt: skip
        pages = committed // PAGE
        tile = start + (row - start) // ROWS * ROWS
        at = slot_before + (tile - start) // ROWS * tl.cdiv(pages, SLOT_PAGES)
        _put_segments(
            segment_ptr, at, start, start + nodes, tile, G + slot, pages, SLOT_PAGES, prompt_cuts,
            row, M, EACH, ROWS, BLOCK,
        )  # fmt: skip
