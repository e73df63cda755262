"""Work list of a step's exact attention: made once on the device, walked by every layer.

Tiles are those of `plan.py`: rows that share keys. A segment is a tile and one cut of its pages:

    segment[w]   first pool row, pool rows, source (g, or G + s), first page, last page + 1,
                 first row of the partial result
    total        segments
    row[m]       cuts of its prompt, cuts of its body, T, keys of its tail, first cuts of both
    tail[m]      the tail's keys: place in the pages, or -2 - (pool row) for a node's

The partial result of row m at cut i begins at row (i M + m) H / K; cuts of the body follow those of
the longest prompt. Results do not depend on which program walks a segment, so each of P programs
takes every P-th one.

The kernel has one program per row. It computes which tiles the row is in and where their segments
are in the list; that of a tile's first row writes the tile's segments.

With a window or a chunk (`first_keys.py`) the cuts stay where they are. Cuts that no row of a
source attends to are left out, and the first of the others begins at the first page that a row
attends to: the pages left out would add exact zeros.
"""

from functools import wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.attention.layout import LAYOUT, TILE, TreeLayout, check_layout
from csd.kernels.attention.triton.first_keys import first_keys, first_keys_triton
from csd.kernels.attention.triton.plan import skipped_pages, tile_rows
from csd.kernels.common.operator import RecordOperator
from csd.state.kv_cache import PAGE
from csd.state.pool import MAX_DEPTH

# keys that may be nodes: a row's own and those on its path; the most keys of a tail
NEAR = MAX_DEPTH + 1
TAIL = NEAR + PAGE - 1
# pages per cut of a prompt, more if there were over PROMPT_CUTS; pages per cut of a slot's tokens
PROMPT_PAGES, PROMPT_CUTS, SLOT_PAGES = 8, 16, 16


@triton.jit
def _first_cut(skipped, pages, step):
    return tl.where(skipped < pages, skipped // step, tl.cdiv(pages, step))


@triton.jit
def _put_segments(
    work,
    index,
    tile,
    last,  # row after those of the source
    source,
    cuts,  # pages that are skipped, pages of the source, pages of a cut, and the first cut's number
    row,
    M,
    C: tl.constexpr,
):
    """Writes the segments of the tile that begins at `row`, if one does, from `index` on."""
    BLOCK: tl.constexpr = C.BLOCK
    skipped, pages, step, cut = cuts
    begin = _first_cut(skipped, pages, step)
    count = tl.where(row == tile, tl.cdiv(pages, step), 0)
    for i in range(begin, count, BLOCK):
        # [BLOCK]
        c = i + tl.arange(0, BLOCK)
        mask = c < count
        to = work.segment + (index + c - begin) * 6
        tl.store(to, tile + 0 * c, mask=mask)
        tl.store(to + 1, tl.minimum(last - tile, C.ROWS) + 0 * c, mask=mask)
        tl.store(to + 2, source + 0 * c, mask=mask)
        tl.store(to + 3, tl.maximum(c * step, skipped), mask=mask)
        tl.store(to + 4, tl.minimum((c + 1) * step, pages), mask=mask)
        tl.store(to + 5, ((cut + c) * M + tile) * C.EACH, mask=mask)


class PlanConstants(NamedTuple):
    """Constants of `plan_exact_kernel`."""

    EACH: int
    ROWS: int
    BLOCK: int
    PAGE: int
    NEAR: int
    TAIL: int
    PROMPT_PAGES: int
    PROMPT_CUTS: int
    SLOT_PAGES: int


@triton.jit(do_not_specialize=["M", "S", "G", "slot_width", "prompt_cuts"])
def plan_exact_kernel(
    layout,
    page_ptr,  # [G + S] int32 of `first_keys`, or None
    work,  # out
    M,
    S,
    G,
    slot_width,
    prompt_cuts,
    C: tl.constexpr,
):
    BLOCK: tl.constexpr = C.BLOCK
    row = tl.program_id(0)
    slot = tl.load(layout.slot + row)
    live = slot >= 0
    committed = tl.load(layout.slot_len + slot, mask=live, other=0)
    start = tl.load(layout.slot_start + slot, mask=live, other=0)
    nodes = tl.load(layout.slot_nodes + slot, mask=live, other=0)

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
        first = tl.load(layout.group_start + g, mask=g < G, other=0)
        last = tl.load(layout.group_start + g + 1, mask=g < G, other=0)
        pages = tl.cdiv(tl.load(layout.prompt_len + g, mask=g < G, other=0), C.PAGE)
        step = tl.maximum(C.PROMPT_PAGES, tl.cdiv(pages, C.PROMPT_CUTS))
        cuts = tl.cdiv(pages, step) - _first_cut(skipped_pages(page_ptr, g, g < G), pages, step)
        segments = tl.cdiv(last - first, C.ROWS) * cuts
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
        first = tl.load(layout.slot_start + s, mask=s < S, other=0)
        tiles = tl.cdiv(tl.load(layout.slot_nodes + s, mask=s < S, other=0), C.ROWS)
        pages = tl.load(layout.slot_len + s, mask=s < S, other=0) // C.PAGE
        begin = _first_cut(skipped_pages(page_ptr, G + s, s < S), pages, C.SLOT_PAGES)
        segments = tiles * (tl.cdiv(pages, C.SLOT_PAGES) - begin)
        slot_before += tl.sum(tl.where(first < start, segments, 0), 0)
        total += tl.sum(segments, 0)
    if row == 0:
        tl.store(work.total, total)

    # [64]
    b = tl.arange(0, 64)
    bit = ((tl.load(layout.ancestors + row) >> b.to(tl.int64)) & 1).to(tl.int32)
    depth = tl.sum(bit, 0)
    below = tl.maximum(committed + depth - C.NEAR, 0) // C.PAGE * C.PAGE
    step = tl.maximum(C.PROMPT_PAGES, tl.cdiv(group_pages, C.PROMPT_CUTS))
    group_skipped = skipped_pages(page_ptr, group, live)
    group_cuts = tl.cdiv(group_pages, step)
    group_first_cut = _first_cut(group_skipped, group_pages, step)
    pages = committed // C.PAGE
    slot_skipped = skipped_pages(page_ptr, G + slot, live)
    slot_first_cut = _first_cut(slot_skipped, pages, C.SLOT_PAGES)
    to = work.row + row * 6
    tl.store(to, tl.where(live, group_cuts, 0))
    tl.store(to + 1, tl.where(live, tl.cdiv(below, C.PAGE * C.SLOT_PAGES), 0))
    tl.store(to + 2, tl.where(live, below, 0))
    tl.store(to + 3, tl.where(live, committed + depth - below, 0))
    tl.store(to + 4, tl.where(live, group_first_cut, 0))
    tl.store(to + 5, tl.where(live, slot_first_cut, 0))

    # [128]
    t = tl.arange(0, 128)
    token = below + t
    old = live & (t < C.TAIL) & (token < committed)
    page = tl.load(layout.slot_pages + slot.to(tl.int64) * slot_width + token // C.PAGE, mask=old)
    tail = work.tail + row.to(tl.int64) * C.TAIL
    tl.store(tail + t, page * C.PAGE + token % C.PAGE, mask=old)
    index = committed - below + tl.cumsum(bit, 0) - 1
    on_path = live & (bit == 1) & (index >= 0) & (index < C.TAIL)
    tl.store(tail + index, -2 - (start + b), mask=on_path)

    tile = group_first + (row - group_first) // C.ROWS * C.ROWS
    index = group_before + (tile - group_first) // C.ROWS * (group_cuts - group_first_cut)
    if live:
        cuts = (group_skipped, group_pages, step, 0)
        _put_segments(work, index, tile, group_last, group, cuts, row, M, C)
        tile = start + (row - start) // C.ROWS * C.ROWS
        count = tl.cdiv(pages, C.SLOT_PAGES) - slot_first_cut
        index = slot_before + (tile - start) // C.ROWS * count
        cuts = (slot_skipped, pages, C.SLOT_PAGES, prompt_cuts)
        _put_segments(work, index, tile, start + nodes, G + slot, cuts, row, M, C)


BLOCK = 64


class ExactWork(NamedTuple):
    segment: torch.Tensor  # [W, 6] int32
    total: torch.Tensor  # [1] int32
    row: torch.Tensor  # [M, 6] int32
    tail: torch.Tensor  # [M, TAIL] int32
    first: torch.Tensor | None = None  # [M, 2] int32, with a window or a chunk


def cuts(layout: TreeLayout) -> tuple[int, int]:
    """Most cuts of a prompt, and of a slot's tokens, by the widths of the page tables."""
    prompt, slot = layout.prompt_pages.shape[1], layout.slot_pages.shape[1]
    return min(PROMPT_CUTS, -(-prompt // PROMPT_PAGES)), -(-slot // SLOT_PAGES)


def empty_exact_work(layout: TreeLayout, heads: int, kv_heads: int) -> ExactWork:
    """Allocates room for any work list of a pool with this layout's sizes."""
    M, S, G = layout.slot.shape[0], layout.slot_len.shape[0], layout.prompt_len.shape[0]
    full, (prompt, slot) = M // tile_rows(heads, kv_heads), cuts(layout)
    segments = min(M, full + G) * prompt + min(M, full + S) * slot

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=layout.slot.device)

    return ExactWork(empty(max(1, segments), 6), empty(1), empty(M, 6), empty(M, TAIL))


def plan_exact_ref(
    layout: TreeLayout, heads: int, kv_heads: int, page: torch.Tensor | None = None
) -> ExactWork:
    """Plain Python. Entries that are never read are -1. page: [G + S] int32, of `first_keys`."""
    M, G, rows = layout.slot.shape[0], layout.prompt_len.shape[0], tile_rows(heads, kv_heads)
    each, before = heads // kv_heads, cuts(layout)[0]
    work = empty_exact_work(layout, heads, kv_heads)
    bounds, starts = layout.group_start.tolist(), layout.slot_start.tolist()
    nodes, lens = layout.slot_nodes.tolist(), layout.slot_len.tolist()
    prompts = [-(-n // PAGE) for n in layout.prompt_len.tolist()]
    skipped = [0] * (G + len(lens)) if page is None else page.tolist()
    sources = [
        (bounds[g], bounds[g + 1], g, pages, max(PROMPT_PAGES, -(-pages // PROMPT_CUTS)), 0)
        for g, pages in enumerate(prompts)
    ] + sorted(
        (starts[s], starts[s] + nodes[s], G + s, n // PAGE, SLOT_PAGES, before)
        for s, n in enumerate(lens)
    )
    segment = [
        [
            tile,
            min(rows, last - tile),
            source,
            max(low, skipped[source]),
            min(low + step, pages),
            ((first_cut + low // step) * M + tile) * each,
        ]
        for first, last, source, pages, step, first_cut in sources
        for tile in range(first, last, rows)
        for low in range(0, pages, step)
        if skipped[source] < min(low + step, pages)
    ]
    for x in work[:4]:
        x.fill_(-1)
    if segment:
        work.segment[: len(segment)] = torch.tensor(segment, dtype=torch.int32)
    work.total.fill_(len(segment))
    words = zip(layout.slot.tolist(), layout.ancestors.tolist(), strict=True)
    for m, (s, word) in enumerate(words):
        if s < 0:
            work.row[m] = 0
            continue
        path = [-2 - (starts[s] + j) for j in range(64) if word >> j & 1]
        below = max(lens[s] + len(path) - NEAR, 0) // PAGE * PAGE
        old = [
            int(layout.slot_pages[s, t // PAGE]) * PAGE + t % PAGE for t in range(below, lens[s])
        ]
        g = next(g for g in range(G) if bounds[g] <= m < bounds[g + 1])
        pages, step = prompts[g], max(PROMPT_PAGES, -(-prompts[g] // PROMPT_CUTS))
        row = (
            -(-pages // step),
            -(-below // (PAGE * SLOT_PAGES)),
            below,
            len(old + path),
            _first_cut_on_host(skipped[g], pages, step),
            _first_cut_on_host(skipped[G + s], lens[s] // PAGE, SLOT_PAGES),
        )
        work.row[m] = torch.tensor(row, dtype=torch.int32)
        work.tail[m, : row[3]] = torch.tensor(old + path, dtype=torch.int32)
    return work


def _first_cut_on_host(page: int, pages: int, step: int) -> int:
    return page // step if page < pages else -(-pages // step)


def plan_exact_triton(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    window: int | None = None,
    chunk: int | None = None,
) -> ExactWork:
    """One launch, or two with a window or a chunk. Entries that are never read are not written."""
    if window is chunk is None:
        return _planned(layout, heads, kv_heads, None)
    first = first_keys_triton(layout, window, chunk)
    return _planned(layout, heads, kv_heads, first.page)._replace(first=first.row)


def _planned(layout: TreeLayout, heads: int, kv_heads: int, page: torch.Tensor | None) -> ExactWork:
    M, S, G = layout.slot.shape[0], layout.slot_len.shape[0], layout.prompt_len.shape[0]
    work = empty_exact_work(layout, heads, kv_heads)
    plan_exact_kernel[(M,)](
        layout=layout,
        page_ptr=page,
        work=work,
        M=M,
        S=S,
        G=G,
        slot_width=layout.slot_pages.stride(0),
        prompt_cuts=cuts(layout)[0],
        C=PlanConstants(
            EACH=heads // kv_heads,
            ROWS=tile_rows(heads, kv_heads),
            BLOCK=BLOCK,
            PAGE=PAGE,
            NEAR=NEAR,
            TAIL=TAIL,
            PROMPT_PAGES=PROMPT_PAGES,
            PROMPT_CUTS=PROMPT_CUTS,
            SLOT_PAGES=SLOT_PAGES,
        ),
        num_warps=1,
    )
    return work


@wraps(plan_exact_ref)
def _on_cpu(*args: Any) -> tuple:
    return plan_exact_ref(*args)[:4]


@wraps(plan_exact_triton)
def _on_gpu(*args: Any) -> tuple:
    return _planned(*args)[:4]


_plan_exact = RecordOperator(
    "plan_exact",
    (
        LAYOUT,
        "SymInt heads",
        "SymInt kv_heads",
        "Tensor? page",
    ),
    _on_cpu,
    _on_gpu,
    returns="(Tensor, Tensor, Tensor, Tensor)",
    fake=lambda layout, heads, kv_heads, page: empty_exact_work(layout, heads, kv_heads)[:4],
)


def plan_exact(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    window: int | None = None,
    chunk: int | None = None,
) -> ExactWork:
    """Returns the work list of `exact_attention` for a model of H = heads and K = kv_heads.

    window, chunk: as in `exact_attention`.
    """
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > TILE:
        raise ValueError(f"heads must be 1 to {TILE} times kv_heads, got {heads} and {kv_heads}")
    check_layout(layout, layout.slot.shape[0], layout.slot.device)
    if window is chunk is None:
        return ExactWork(*_plan_exact(layout, heads, kv_heads, None))
    first = first_keys(layout, window, chunk)
    work = ExactWork(*_plan_exact(layout, heads, kv_heads, first.page))
    return work._replace(first=first.row)
