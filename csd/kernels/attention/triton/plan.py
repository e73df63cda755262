"""Work list of a step's attention: made once on the device, walked by every layer.

Rows that share keys form tiles of `rows` pool rows, at most 64 rows of a matrix product with the
H / K query heads of a key-value head. A tile's keys are units of 64 tokens (a page):

    a group's tile    ceil(prompt_len / 64) units: its prompt
    a slot's tile     ceil(slot_len / 64) + 1 units: its committed tokens, then its nodes

All units in one line, group tiles first, both in the order of pool rows, are cut into `programs`
equal shares. The part of tile n in program p's share is one segment of work. Tile and program
numbers do not decrease along the line, so n + p identifies the segment, and the segments of a tile
or a program are consecutive. Where cuts coincide there is a gap that is never read.

    segment[n + p]  = first pool row, pool rows, source (g, or G + s), first unit, last unit + 1,
                      first row of the partial result
    program[p]      = first segment, last segment + 1
    merge[m]        = first row of the partials, splits: of the prompt, then of the slot

A tile's partials are `rows` * H / K rows apart.

The kernel computes for every row which tiles the row is in and where they are in the line of units;
the first row of a tile writes the tile's segments.

With a window or a chunk a source's units begin at the first page that any of its rows attends to,
and the list has for each row its first keys and the nodes that it attends to (`first_keys.py`).
"""

from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl

from csd.kernels.attention.layout import ROWS, TILE, TreeLayout, Work, check_rows
from csd.kernels.attention.triton.first_keys import first_keys, first_keys_triton
from csd.kernels.common.gpu import programs_of
from csd.kernels.common.operator import RecordOperator
from csd.state.kv_cache import PAGE


@triton.jit
def _put_tiles(
    row,
    valid,
    source,  # each row's: first and last row, number, units, skipped; units and tiles before it
    share,
    total,
    part,
    M,
    work,  # written: segment, program and merge
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    first, last, number, units, skipped, before = source
    units_before, tiles_before = before
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
    tl.store(work.merge + row * 4 + 2 * part, tl.where(valid, result, 0), mask=in_pool)
    tl.store(work.merge + row * 4 + 2 * part + 1, splits, mask=in_pool)

    # the first row of a tile writes its segments
    lead_splits = tl.where(row == tile_first, splits, 0)
    for i in range(0, tl.max(lead_splits, 0), BLOCK_P):
        # [BLOCK, BLOCK_P]
        offs = i + tl.arange(0, BLOCK_P)[None, :]
        p = split_first[:, None] + offs
        mask = offs < lead_splits[:, None]
        low = tl.maximum(a[:, None], p * share)
        high = tl.minimum(b[:, None], (p + 1) * share)
        ptrs = work.segment + (n[:, None] + p) * 6
        tl.store(ptrs, tile_first[:, None] + 0 * p, mask=mask)
        tl.store(ptrs + 1, tl.minimum(last - tile_first, ROWS)[:, None] + 0 * p, mask=mask)
        tl.store(ptrs + 2, number[:, None] + 0 * p, mask=mask)
        tl.store(ptrs + 3, low - a[:, None] + skipped[:, None], mask=mask)
        tl.store(ptrs + 4, high - a[:, None] + skipped[:, None], mask=mask)
        tl.store(ptrs + 5, base[:, None] + p * ROWS * EACH, mask=mask)
        # one tile holds the first unit of a program, one the last
        opens = mask & (p * share >= a[:, None])
        closes = mask & (tl.minimum((p + 1) * share, total) <= b[:, None])
        tl.store(work.program + p * 2, n[:, None] + p, mask=opens)
        tl.store(work.program + p * 2 + 1, n[:, None] + p + 1, mask=closes)


@triton.jit
def skipped_pages(page_ptr, source, mask):
    """Number of pages at a source's beginning that no row reads."""
    if page_ptr is None:
        return 0 * source
    else:
        return tl.load(page_ptr + source, mask=mask, other=0)


@triton.jit(do_not_specialize=["M", "S", "G", "programs"])
def plan_attention_kernel(
    layout,
    page_ptr,  # [G + S] int32 of `first_keys`, or None
    work,  # out
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
    slot = tl.load(layout.slot + row, mask=row < M, other=-1)
    live = slot >= 0
    slot_first = tl.load(layout.slot_start + slot, mask=live, other=0)
    slot_last = slot_first + tl.load(layout.slot_nodes + slot, mask=live, other=0)
    slot_units = tl.cdiv(tl.load(layout.slot_len + slot, mask=live, other=0), PAGE) + 1
    slot_skipped = skipped_pages(page_ptr, G + slot, live)
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
        first = tl.load(layout.group_start + g, mask=g < G, other=M)
        last = tl.load(layout.group_start + g + 1, mask=g < G, other=M)
        units = tl.cdiv(tl.load(layout.prompt_len + g, mask=g < G, other=0), PAGE)
        units -= skipped_pages(page_ptr, g, g < G)
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
        first = tl.load(layout.slot_start + s, mask=s < S, other=0)
        nodes = tl.load(layout.slot_nodes + s, mask=s < S, other=0)
        units = tl.cdiv(tl.load(layout.slot_len + s, mask=s < S, other=0), PAGE) + 1
        units -= skipped_pages(page_ptr, G + s, s < S)
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
            tl.store(work.program + p * 2, 0 * p, mask=idle)
            tl.store(work.program + p * 2 + 1, 0 * p, mask=idle)

    valid, skipped = live & (group_units > 0), skipped_pages(page_ptr, group, live)
    before = (group_units_before, group_tiles_before)
    source = (group_first, group_last, group, group_units, skipped, before)
    _put_tiles(row, valid, source, share, total, 0, M, work, EACH, ROWS, BLOCK_P)
    before = (slot_units_before, slot_tiles_before)
    source = (slot_first, slot_last, G + slot, slot_units, slot_skipped, before)
    _put_tiles(row, live, source, share, total, 1, M, work, EACH, ROWS, BLOCK_P)


BLOCK = 32


def _sizes(layout: TreeLayout) -> tuple[int, int, int]:
    """Numbers of rows, slots and groups."""
    return layout.slot.shape[0], layout.slot_len.shape[0], layout.prompt_len.shape[0]


def tile_rows(heads: int, kv_heads: int) -> int:
    """Pool rows of a tile: as many as fit TILE rows with the query heads of a key-value head."""
    return TILE // (heads // kv_heads)


def programs_for(device: torch.device, kv_heads: int) -> int:
    """Programs per KV head, so that those of all heads fill the device."""
    return max(1, programs_of(device) // kv_heads)


def empty_work(
    rows: int,
    slots: int,
    groups: int,
    heads: int,
    kv_heads: int,
    programs: int,
    device: torch.device,
) -> Work:
    """Allocates room for any work list of a pool of `rows` rows."""
    full = rows // tile_rows(heads, kv_heads)
    tiles = min(rows, full + groups) + min(rows, full + slots)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Work(empty(tiles + programs, 6), empty(programs, 2), empty(rows, 4))


def plan_attention_ref(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    programs: int | None = None,
    page: torch.Tensor | None = None,  # [G + S] int32, of `first_keys`
    out: Work | None = None,
) -> Work:
    """Plain Python. Entries that are never read are -1."""
    M, S, G = _sizes(layout)
    programs = programs or programs_for(layout.slot.device, kv_heads)
    each, rows = heads // kv_heads, tile_rows(heads, kv_heads)
    work = out or empty_work(M, S, G, heads, kv_heads, programs, layout.slot.device)
    bounds, starts = layout.group_start.tolist(), layout.slot_start.tolist()
    nodes, prompt_lens = layout.slot_nodes.tolist(), layout.prompt_len.tolist()
    skipped = [0] * (G + S) if page is None else page.tolist()
    parts = (
        [(bounds[g], bounds[g + 1], g, -(-n // PAGE)) for g, n in enumerate(prompt_lens)],
        sorted(
            (starts[s], starts[s] + nodes[s], G + s, -(-n // PAGE) + 1)
            for s, n in enumerate(layout.slot_len.tolist())
            if nodes[s]
        ),
    )
    tiles = [
        (part, first, min(rows, last - first), source, units - skipped[source])
        for part, sources in enumerate(parts)
        for start, last, source, units in sources
        if units > skipped[source]
        for first in range(start, last, rows)
    ]
    share = max(1, -(-sum(t[-1] for t in tiles) // programs))
    segment = [[-1] * 6 for _ in range(work.segment.shape[0])]
    program = [[0, 0] for _ in range(programs)]
    merge = [[0, 0, 0, 0] for _ in range(M)]
    a = 0
    for n, (part, first, count, source, units) in enumerate(tiles):
        b = a + units
        splits = range(a // share, (b - 1) // share + 1)
        for p in splits:
            base = (part * M + first + p * rows) * each
            low, high = (
                skipped[source] + x - a for x in (max(a, p * share), min(b, (p + 1) * share))
            )
            segment[n + p] = [first, count, source, low, high, base]
            if p * share >= a:
                program[p][0] = n + p
            program[p][1] = n + p + 1
        for m in range(first, first + count):
            base = (part * M + m + splits[0] * rows) * each
            merge[m][2 * part : 2 * part + 2] = [base, len(splits)]
        a = b
    for target, values in zip(work[:3], (segment, program, merge), strict=True):
        target.copy_(torch.tensor(values, dtype=torch.int32).view(target.shape))
    return work


def plan_attention_triton(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    programs: int | None = None,
    out: Work | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Work:
    """One launch, or two with a window or a chunk. Entries that are never read are not written."""
    if window is chunk is None:
        return _planned(layout, heads, kv_heads, programs, None, out)
    first = first_keys_triton(layout, window, chunk)
    work = _planned(layout, heads, kv_heads, programs, first.page, out)
    return work._replace(first=first.row, seen=first.seen)


def _planned(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    programs: int | None = None,
    page: torch.Tensor | None = None,
    out: Work | None = None,
) -> Work:
    M, S, G = _sizes(layout)
    programs = programs or programs_for(layout.slot.device, kv_heads)
    work = out or empty_work(M, S, G, heads, kv_heads, programs, layout.slot.device)
    plan_attention_kernel[(triton.cdiv(M, BLOCK),)](
        layout=ROWS(layout),
        page_ptr=page,
        work=work,
        M=M,
        S=S,
        G=G,
        programs=programs,
        EACH=heads // kv_heads,
        ROWS=tile_rows(heads, kv_heads),
        PAGE=PAGE,
        BLOCK=BLOCK,
        BLOCK_Z=64,
        BLOCK_P=16,
        num_warps=4,
    )
    return work


def _fake(
    layout: TreeLayout, heads: int, kv_heads: int, programs: int, page: torch.Tensor | None
) -> tuple:
    return empty_work(*_sizes(layout), heads, kv_heads, programs, layout.slot.device)[:3]


@wraps(plan_attention_ref)
def _on_cpu(*args: Any) -> tuple:
    return plan_attention_ref(*args)[:3]


@wraps(plan_attention_triton)
def _on_gpu(*args: Any) -> tuple:
    return _planned(*args)[:3]


_plan_attention = RecordOperator(
    "plan_attention",
    (
        ROWS,
        "SymInt heads",
        "SymInt kv_heads",
        "SymInt programs",
        "Tensor? page",
    ),
    _on_cpu,
    _on_gpu,
    returns="(Tensor, Tensor, Tensor)",
    fake=_fake,
)


def plan_attention(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    programs: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> Work:
    """Returns the work list for a model of H = heads and K = kv_heads; programs: per KV head.

    window, chunk: as in `tree_attention`.
    """
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > TILE:
        raise ValueError(f"heads must be 1 to {TILE} times kv_heads, got {heads} and {kv_heads}")
    if programs is not None and programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")
    check_rows(layout, layout.slot.device)
    programs = programs or programs_for(layout.slot.device, kv_heads)
    if window is chunk is None:
        return Work(*_plan_attention(layout, heads, kv_heads, programs, None))
    first = first_keys(layout, window, chunk)
    work = Work(*_plan_attention(layout, heads, kv_heads, programs, first.page))
    return work._replace(first=first.row, seen=first.seen)
