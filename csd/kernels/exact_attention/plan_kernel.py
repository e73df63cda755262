"""Kernel of the exact attention's work list (`csd/kernels/exact_attention/plan.py`).

The program of a row computes which tiles the row is in and where their segments are in the list;
that of a tile's first row writes the tile's segments.
"""

import triton
import triton.language as tl


@triton.jit
def _skipped(page_ptr, source, mask):
    """Number of pages at a source's beginning that no row reads."""
    if page_ptr is None:
        return 0 * source
    else:
        return tl.load(page_ptr + source, mask=mask, other=0)


@triton.jit
def _first_cut(skipped, pages, step):
    return tl.where(skipped < pages, skipped // step, tl.cdiv(pages, step))


@triton.jit
def _put_segments(
    segment_ptr, at, first, last, tile, source, skipped, pages, step, cut, row, M,
    EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the segments of the tile that begins at `row`, if one does, from index `at` on."""
    begin = _first_cut(skipped, pages, step)
    count = tl.where(row == tile, tl.cdiv(pages, step), 0)
    for i in range(begin, count, BLOCK):
        # [BLOCK]
        c = i + tl.arange(0, BLOCK)
        mask = c < count
        to = segment_ptr + (at + c - begin) * 6
        tl.store(to, tile + 0 * c, mask=mask)
        tl.store(to + 1, tl.minimum(last - tile, ROWS) + 0 * c, mask=mask)
        tl.store(to + 2, source + 0 * c, mask=mask)
        tl.store(to + 3, tl.maximum(c * step, skipped), mask=mask)
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
    page_ptr,  # [G + S] int32 of `first_keys`, or None
    segment_ptr,  # [W, 6] int32
    count_ptr,  # [1] int32
    row_ptr,  # [M, 6] int32
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

    # summing over all groups and slots for each row is cheaper than a launch for prefix sums
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
        cuts = tl.cdiv(pages, step) - _first_cut(_skipped(page_ptr, g, g < G), pages, step)
        segments = tl.cdiv(last - first, ROWS) * cuts
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
        begin = _first_cut(_skipped(page_ptr, G + s, s < S), pages, SLOT_PAGES)
        segments = tiles * (tl.cdiv(pages, SLOT_PAGES) - begin)
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
    group_skipped = _skipped(page_ptr, group, live)
    group_cuts = tl.cdiv(group_pages, step)
    group_first_cut = _first_cut(group_skipped, group_pages, step)
    pages = committed // PAGE
    slot_skipped = _skipped(page_ptr, G + slot, live)
    slot_first_cut = _first_cut(slot_skipped, pages, SLOT_PAGES)
    to = row_ptr + row * 6
    tl.store(to, tl.where(live, group_cuts, 0))
    tl.store(to + 1, tl.where(live, tl.cdiv(below, PAGE * SLOT_PAGES), 0))
    tl.store(to + 2, tl.where(live, below, 0))
    tl.store(to + 3, tl.where(live, committed + depth - below, 0))
    tl.store(to + 4, tl.where(live, group_first_cut, 0))
    tl.store(to + 5, tl.where(live, slot_first_cut, 0))

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
    at = group_before + (tile - group_first) // ROWS * (group_cuts - group_first_cut)
    if live:
        _put_segments(
            segment_ptr, at, group_first, group_last, tile, group, group_skipped, group_pages, step,
            0, row, M, EACH, ROWS, BLOCK,
        )  # fmt: skip
        tile = start + (row - start) // ROWS * ROWS
        cuts = tl.cdiv(pages, SLOT_PAGES) - slot_first_cut
        at = slot_before + (tile - start) // ROWS * cuts
        _put_segments(
            segment_ptr, at, start, start + nodes, tile, G + slot, slot_skipped, pages, SLOT_PAGES,
            prompt_cuts, row, M, EACH, ROWS, BLOCK,
        )  # fmt: skip
