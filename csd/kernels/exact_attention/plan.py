"""The work list of a step's exact attention: made once on the device, walked by every layer.

Tiles are those of `csd/kernels/tree_attention/plan.py`: rows that share keys. A segment is a tile
and one cut of its pages:

    segment[w]   first pool row, pool rows, source (g, or G + s), first page, last page + 1,
                 first row of the partial result
    count        segments
    row[m]       cuts of its prompt, cuts of its body, T, keys of its tail
    tail[m]      the tail's keys: place in the pages, or -2 - (pool row) for a node's

The partial result of row m at cut i begins at row (i M + m) H / K; cuts of the body follow those of
the longest prompt. Who walks a segment changes nothing, so programs take every P-th one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.exact_attention.constants import (
    NEAR,
    PROMPT_CUTS,
    PROMPT_PAGES,
    SLOT_PAGES,
    TAIL,
)
from csd.kernels.operator import Fields, RecordOperator
from csd.kernels.tree_attention.layout import TreeLayout, check_layout
from csd.kernels.tree_attention.plan import TILE, tile_rows
from csd.state.kv_cache import PAGE

BLOCK = 64


class ExactWork(NamedTuple):
    segment: torch.Tensor  # [W, 6] int32
    count: torch.Tensor  # [1] int32
    row: torch.Tensor  # [M, 4] int32
    tail: torch.Tensor  # [M, TAIL] int32


def cuts(layout: TreeLayout) -> tuple[int, int]:
    """The most cuts of a prompt, and of a slot's tokens, by the widths of the page tables."""
    prompt, slot = layout.prompt_pages.shape[1], layout.slot_pages.shape[1]
    return min(PROMPT_CUTS, -(-prompt // PROMPT_PAGES)), -(-slot // SLOT_PAGES)


def empty_exact_work(layout: TreeLayout, heads: int, kv_heads: int) -> ExactWork:
    """Room for any work list of a pool of as many rows."""
    M, S, G = layout.slot.shape[0], layout.slot_len.shape[0], layout.prompt_len.shape[0]
    full, (prompt, slot) = M // tile_rows(heads, kv_heads), cuts(layout)
    segments = min(M, full + G) * prompt + min(M, full + S) * slot

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=layout.slot.device)

    return ExactWork(empty(max(1, segments), 6), empty(1), empty(M, 4), empty(M, TAIL))


def plan_exact_ref(layout: TreeLayout, heads: int, kv_heads: int) -> ExactWork:
    """Plain Python. Entries that nobody reads are -1."""
    M, G, rows = layout.slot.shape[0], layout.prompt_len.shape[0], tile_rows(heads, kv_heads)
    each, before = heads // kv_heads, cuts(layout)[0]
    work = empty_exact_work(layout, heads, kv_heads)
    bounds, starts = layout.group_start.tolist(), layout.slot_start.tolist()
    nodes, lens = layout.slot_nodes.tolist(), layout.slot_len.tolist()
    prompts = [-(-n // PAGE) for n in layout.prompt_len.tolist()]
    sources = [
        (bounds[g], bounds[g + 1], g, pages, max(PROMPT_PAGES, -(-pages // PROMPT_CUTS)), 0)
        for g, pages in enumerate(prompts)
    ] + sorted(
        (starts[s], starts[s] + nodes[s], G + s, n // PAGE, SLOT_PAGES, before)
        for s, n in enumerate(lens)
    )
    segment = [
        [tile, min(rows, last - tile), source, low, min(low + step, pages),
         ((at + low // step) * M + tile) * each]
        for first, last, source, pages, step, at in sources
        for tile in range(first, last, rows)
        for low in range(0, pages, step)
    ]  # fmt: skip
    for x in work:
        x.fill_(-1)
    if segment:
        work.segment[: len(segment)] = torch.tensor(segment, dtype=torch.int32)
    work.count.fill_(len(segment))
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
        pages = prompts[next(g for g in range(G) if bounds[g] <= m < bounds[g + 1])]
        prompt = -(-pages // max(PROMPT_PAGES, -(-pages // PROMPT_CUTS)))
        row = prompt, -(-below // (PAGE * SLOT_PAGES)), below, len(old + path)
        work.row[m] = torch.tensor(row, dtype=torch.int32)
        work.tail[m, : row[3]] = torch.tensor(old + path, dtype=torch.int32)
    return work


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


def plan_exact_triton(layout: TreeLayout, heads: int, kv_heads: int) -> ExactWork:
    """One launch. Entries that nobody reads are not written."""
    M, S, G = layout.slot.shape[0], layout.slot_len.shape[0], layout.prompt_len.shape[0]
    work = empty_exact_work(layout, heads, kv_heads)
    _plan_exact_kernel[(M,)](
        prompt_len_ptr=layout.prompt_len,
        slot_len_ptr=layout.slot_len,
        slot_pages_ptr=layout.slot_pages,
        slot_ptr=layout.slot,
        ancestors_ptr=layout.ancestors,
        slot_start_ptr=layout.slot_start,
        slot_nodes_ptr=layout.slot_nodes,
        group_start_ptr=layout.group_start,
        segment_ptr=work.segment,
        count_ptr=work.count,
        row_ptr=work.row,
        tail_ptr=work.tail,
        M=M,
        S=S,
        G=G,
        slot_width=layout.slot_pages.stride(0),
        prompt_cuts=cuts(layout)[0],
        EACH=heads // kv_heads,
        ROWS=tile_rows(heads, kv_heads),
        PAGE=PAGE,
        NEAR=NEAR,
        TAIL=TAIL,
        PROMPT_PAGES=PROMPT_PAGES,
        PROMPT_CUTS=PROMPT_CUTS,
        SLOT_PAGES=SLOT_PAGES,
        BLOCK=BLOCK,
        num_warps=1,
    )
    return work


_plan_exact = RecordOperator(
    "plan_exact",
    (Fields("layout", spread=True, make=TreeLayout), "SymInt heads", "SymInt kv_heads"),
    plan_exact_ref,
    plan_exact_triton,
    returns="(Tensor, Tensor, Tensor, Tensor)",
    fake=empty_exact_work,
)


def plan_exact(layout: TreeLayout, heads: int, kv_heads: int) -> ExactWork:
    """The work list of `exact_attention` for a model of H = heads and K = kv_heads."""
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > TILE:
        raise ValueError(f"heads must be 1 to {TILE} times kv_heads, got {heads} and {kv_heads}")
    check_layout(layout, layout.slot.shape[0], layout.slot.device)
    return ExactWork(*_plan_exact(layout, heads, kv_heads))
