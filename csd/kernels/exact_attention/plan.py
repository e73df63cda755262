"""Work list of a step's exact attention: made once on the device, walked by every layer.

Tiles are those of `csd/kernels/tree_attention/plan.py`: rows that share keys. A segment is a tile
and one cut of its pages:

    segment[w]   first pool row, pool rows, source (g, or G + s), first page, last page + 1,
                 first row of the partial result
    total        segments
    row[m]       cuts of its prompt, cuts of its body, T, keys of its tail, first cuts of both
    tail[m]      the tail's keys: place in the pages, or -2 - (pool row) for a node's

The partial result of row m at cut i begins at row (i M + m) H / K; cuts of the body follow those of
the longest prompt. Results do not depend on which program walks a segment, so each of P programs
takes every P-th one.

With a window or a chunk (`csd/kernels/tree_attention/first_keys.py`) the cuts stay where they are.
Cuts that no row of a source attends to are left out, and the first of the others begins at the
first page that a row attends to: the pages left out would add exact zeros.
"""

from functools import wraps
from typing import Any, NamedTuple

import torch

from csd.kernels.exact_attention.constants import (
    NEAR,
    PROMPT_CUTS,
    PROMPT_PAGES,
    SLOT_PAGES,
    TAIL,
)
from csd.kernels.exact_attention.plan_kernel import _plan_exact_kernel
from csd.kernels.torch_operators import Fields, RecordOperator
from csd.kernels.tree_attention.first_keys import first_keys, first_keys_triton
from csd.kernels.tree_attention.layout import TreeLayout, check_layout
from csd.kernels.tree_attention.plan import TILE, tile_rows
from csd.state.kv_cache import PAGE

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
        [tile, min(rows, last - tile), source, max(low, skipped[source]), min(low + step, pages),
         ((at + low // step) * M + tile) * each]
        for first, last, source, pages, step, at in sources
        for tile in range(first, last, rows)
        for low in range(0, pages, step)
        if skipped[source] < min(low + step, pages)
    ]  # fmt: skip
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
            -(-pages // step), -(-below // (PAGE * SLOT_PAGES)), below, len(old + path),
            _first_cut(skipped[g], pages, step),
            _first_cut(skipped[G + s], lens[s] // PAGE, SLOT_PAGES),
        )  # fmt: skip
        work.row[m] = torch.tensor(row, dtype=torch.int32)
        work.tail[m, : row[3]] = torch.tensor(old + path, dtype=torch.int32)
    return work


def _first_cut(page: int, pages: int, step: int) -> int:
    return page // step if page < pages else -(-pages // step)


def plan_exact_triton(
    layout: TreeLayout, heads: int, kv_heads: int, window: int | None = None,
    chunk: int | None = None,
) -> ExactWork:  # fmt: skip
    """One launch, or two with a window or a chunk. Entries that are never read are not written."""
    if window is chunk is None:
        return _planned(layout, heads, kv_heads, None)
    first = first_keys_triton(layout, window, chunk)
    return _planned(layout, heads, kv_heads, first.page)._replace(first=first.row)


def _planned(layout: TreeLayout, heads: int, kv_heads: int, page: torch.Tensor | None) -> ExactWork:
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
        page_ptr=page,
        segment_ptr=work.segment,
        count_ptr=work.total,
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


@wraps(plan_exact_ref)
def _on_cpu(*args: Any) -> tuple:
    return plan_exact_ref(*args)[:4]


@wraps(plan_exact_triton)
def _on_gpu(*args: Any) -> tuple:
    return _planned(*args)[:4]


_plan_exact = RecordOperator(
    "plan_exact",
    (
        Fields("layout", spread=True, make=TreeLayout),
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
    layout: TreeLayout, heads: int, kv_heads: int, window: int | None = None,
    chunk: int | None = None,
) -> ExactWork:  # fmt: skip
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
