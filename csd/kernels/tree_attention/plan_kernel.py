"""Kernel of the attention's work list, described in `csd/kernels/tree_attention/plan.py`.

For every row it is computed which tiles the row is in and where they are in the line of units; the
first row of a tile writes the tile's segments.
"""

import triton
import triton.language as tl


@triton.jit
def _put_tiles(
    row,
    valid,
    first,
    last,
    source,
    units,
    skipped,
    units_before,
    tiles_before,
    share,
    total,
    part,
    M,
    segment_ptr,
    program_ptr,
    merge_ptr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # [BLOCK]: each row's tile and its place in the line; skipped: units left out before it
    t = (row - first) // ROWS
    tile_first = first + t * ROWS
    n = tiles_before + t
    a = units_before + t * units
    b = a + units
    split_first = a // share
    splits = tl.where(valid, (b - 1) // share + 1 - split_first, 0)
    base = (part * M + tile_first) * EACH

    in_pool = row < M
    result = base + split_first * ROWS * EACH + (row - tile_first) * EACH
    tl.store(merge_ptr + row * 4 + 2 * part, tl.where(valid, result, 0), mask=in_pool)
    tl.store(merge_ptr + row * 4 + 2 * part + 1, splits, mask=in_pool)

    # the first row of a tile writes its segments
    lead_splits = tl.where(row == tile_first, splits, 0)
    for i in range(0, tl.max(lead_splits, 0), BLOCK_P):
        # [BLOCK, BLOCK_P]
        offs = i + tl.arange(0, BLOCK_P)[None, :]
        p = split_first[:, None] + offs
        mask = offs < lead_splits[:, None]
        low = tl.maximum(a[:, None], p * share)
        high = tl.minimum(b[:, None], (p + 1) * share)
        at = segment_ptr + (n[:, None] + p) * 6
        tl.store(at, tile_first[:, None] + 0 * p, mask=mask)
        tl.store(at + 1, tl.minimum(last - tile_first, ROWS)[:, None] + 0 * p, mask=mask)
        tl.store(at + 2, source[:, None] + 0 * p, mask=mask)
        tl.store(at + 3, low - a[:, None] + skipped[:, None], mask=mask)
        tl.store(at + 4, high - a[:, None] + skipped[:, None], mask=mask)
        tl.store(at + 5, base[:, None] + p * ROWS * EACH, mask=mask)
        # one tile holds the first unit of a program, one the last
        opens = mask & (p * share >= a[:, None])
        closes = mask & (tl.minimum((p + 1) * share, total) <= b[:, None])
        tl.store(program_ptr + p * 2, n[:, None] + p, mask=opens)
        tl.store(program_ptr + p * 2 + 1, n[:, None] + p + 1, mask=closes)


@triton.jit
def _skipped(page_ptr, source, mask):
    """Number of pages at a source's beginning that no row reads."""
    if page_ptr is None:
        return tl.zeros(source.shape, tl.int32)
    else:
        return tl.load(page_ptr + source, mask=mask, other=0)


@triton.jit(do_not_specialize=["M", "S", "G", "programs"])
def _plan_attention_kernel(
    prompt_len_ptr,  # [G] int32
    slot_len_ptr,  # [S] int32
    slot_ptr,  # [M] int32
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    group_start_ptr,  # [G + 1] int32
    page_ptr,  # [G + S] int32 of `first_keys`, or None
    segment_ptr,  # [W, 6] int32
    program_ptr,  # [programs, 2] int32
    merge_ptr,  # [M, 4] int32
    M,
    S,
    G,
    programs,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # [BLOCK]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row, mask=row < M, other=-1)
    live = slot >= 0
    slot_first = tl.load(slot_start_ptr + slot, mask=live, other=0)
    slot_last = slot_first + tl.load(slot_nodes_ptr + slot, mask=live, other=0)
    slot_units = tl.cdiv(tl.load(slot_len_ptr + slot, mask=live, other=0), PAGE) + 1
    slot_skipped = _skipped(page_ptr, G + slot, live)
    slot_units -= slot_skipped

    # summing over all groups and slots for each row is cheaper than a launch for prefix sums
    group = tl.zeros([BLOCK], tl.int32)
    group_first = tl.zeros([BLOCK], tl.int32)
    group_last = tl.zeros([BLOCK], tl.int32)
    group_units = tl.zeros([BLOCK], tl.int32)
    group_units_before = tl.zeros([BLOCK], tl.int32)
    group_tiles_before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros((), tl.int32)
    tiles_all = tl.zeros((), tl.int32)
    for z in range(0, G, BLOCK_Z):
        # [BLOCK_Z]
        g = z + tl.arange(0, BLOCK_Z)
        first = tl.load(group_start_ptr + g, mask=g < G, other=M)
        last = tl.load(group_start_ptr + g + 1, mask=g < G, other=M)
        units = tl.cdiv(tl.load(prompt_len_ptr + g, mask=g < G, other=0), PAGE)
        units -= _skipped(page_ptr, g, g < G)
        tiles = tl.where(units > 0, tl.cdiv(last - first, ROWS), 0)
        # [BLOCK, BLOCK_Z]
        mine = (first[None, :] <= row[:, None]) & (row[:, None] < last[None, :])
        before = last[None, :] <= row[:, None]
        group += tl.sum(tl.where(mine, g[None, :], 0), 1)
        group_first += tl.sum(tl.where(mine, first[None, :], 0), 1)
        group_last += tl.sum(tl.where(mine, last[None, :], 0), 1)
        group_units += tl.sum(tl.where(mine, units[None, :], 0), 1)
        group_units_before += tl.sum(tl.where(before, (tiles * units)[None, :], 0), 1)
        group_tiles_before += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        total += tl.sum(tiles * units, 0)
        tiles_all += tl.sum(tiles, 0)
    slot_units_before = tl.zeros([BLOCK], tl.int32) + total
    slot_tiles_before = tl.zeros([BLOCK], tl.int32) + tiles_all
    for z in range(0, S, BLOCK_Z):
        # [BLOCK_Z]
        s = z + tl.arange(0, BLOCK_Z)
        first = tl.load(slot_start_ptr + s, mask=s < S, other=0)
        nodes = tl.load(slot_nodes_ptr + s, mask=s < S, other=0)
        units = tl.cdiv(tl.load(slot_len_ptr + s, mask=s < S, other=0), PAGE) + 1
        units -= _skipped(page_ptr, G + s, s < S)
        tiles = tl.cdiv(nodes, ROWS)
        # [BLOCK, BLOCK_Z]
        before = first[None, :] < slot_first[:, None]
        slot_units_before += tl.sum(tl.where(before, (tiles * units)[None, :], 0), 1)
        slot_tiles_before += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        total += tl.sum(tiles * units, 0)
    share = tl.maximum(tl.cdiv(total, programs), 1)

    if tl.program_id(0) == 0:
        for i in range(0, programs, BLOCK_P):
            p = i + tl.arange(0, BLOCK_P)
            idle = (p < programs) & (p * share >= total)
            tl.store(program_ptr + p * 2, 0 * p, mask=idle)
            tl.store(program_ptr + p * 2 + 1, 0 * p, mask=idle)

    _put_tiles(
        row=row,
        valid=live & (group_units > 0),
        first=group_first,
        last=group_last,
        source=group,
        units=group_units,
        skipped=_skipped(page_ptr, group, live),
        units_before=group_units_before,
        tiles_before=group_tiles_before,
        share=share,
        total=total,
        part=0,
        M=M,
        segment_ptr=segment_ptr,
        program_ptr=program_ptr,
        merge_ptr=merge_ptr,
        EACH=EACH,
        ROWS=ROWS,
        BLOCK_P=BLOCK_P,
    )
    _put_tiles(
        row=row,
        valid=live,
        first=slot_first,
        last=slot_last,
        source=G + slot,
        units=slot_units,
        skipped=slot_skipped,
        units_before=slot_units_before,
        tiles_before=slot_tiles_before,
        share=share,
        total=total,
        part=1,
        M=M,
        segment_ptr=segment_ptr,
        program_ptr=program_ptr,
        merge_ptr=merge_ptr,
        EACH=EACH,
        ROWS=ROWS,
        BLOCK_P=BLOCK_P,
    )
