"""First keys that rows attend to with a window or a chunk: once per step for all such layers.

A key's position is its place in its sample: of prompt token t it is t, of committed token j it is
P + j with P the prompt's tokens, of a node it is P + C + depth with C the committed ones. A row at
position x attends to the keys on its path from position

    first(x) = max(0, x - window + 1, x - x mod chunk)

on. Positions on a path are consecutive, so two integers and a word per row are enough:

    row[m]    first - of the prompt's tokens; first - P of the committed ones, at least 0
    seen[m]   the bits of ancestors[m] without the first(x) - P - C lowest, where these are any
    page[i]   the first page that any row of source i reads, g or G + s, or the number of its pages
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.attention.layout import LAYOUT, TreeLayout, check_layout, check_reach
from csd.kernels.common.operator import RecordOperator
from csd.state.kv_cache import PAGE

# larger than every position: stands for no window, and for no chunk
NONE = 1 << 30


class FirstKeys(NamedTuple):
    row: torch.Tensor  # [M, 2] int32; arbitrary for rows of no slot
    seen: torch.Tensor  # [M] int64
    page: torch.Tensor  # [G + S] int32


def empty_first_keys(layout: TreeLayout) -> FirstKeys:
    M, device = layout.slot.shape[0], layout.slot.device
    sources = layout.prompt_len.shape[0] + layout.slot_len.shape[0]
    return FirstKeys(
        torch.empty(M, 2, dtype=torch.int32, device=device),
        torch.empty(M, dtype=torch.int64, device=device),
        torch.empty(sources, dtype=torch.int32, device=device),
    )


def first_keys_ref(layout: TreeLayout, window: int | None, chunk: int | None) -> FirstKeys:
    """Plain Python. Entries that are never read are 0."""
    made = empty_first_keys(layout)
    for x in made:
        x.zero_()
    bounds, starts = layout.group_start.tolist(), layout.slot_start.tolist()
    prompts, lens = layout.prompt_len.tolist(), layout.slot_len.tolist()
    least = [NONE] * len(prompts)
    for s, nodes in enumerate(layout.slot_nodes.tolist()):
        if not nodes:
            continue
        g = next(g for g in range(len(prompts)) if starts[s] < bounds[g + 1])
        P, C, root = prompts[g], lens[s], NONE
        for m in range(starts[s], starts[s] + nodes):
            word = int(layout.ancestors[m]) % 2**64
            position = P + C + word.bit_count() - 1
            first = max(0, position - (window or NONE) + 1, position - position % (chunk or NONE))
            root = min(root, first)
            made.row[m, 0], made.row[m, 1] = first, max(first - P, 0)
            for _ in range(first - P - C):
                word &= word - 1
            made.seen[m] = word - 2**64 if word >> 63 else word
        least[g] = min(least[g], root)
        made.page[len(prompts) + s] = _first_page(max(root - P, 0), C)
    for g, (P, first) in enumerate(zip(prompts, least, strict=True)):
        made.page[g] = _first_page(first, P)
    return made


def _first_page(first: int, tokens: int) -> int:
    return first // PAGE if first < tokens else -(-tokens // PAGE)


@triton.jit
def _first(position, window, chunk):
    return tl.maximum(tl.maximum(position - window + 1, position - position % chunk), 0)


@triton.jit(do_not_specialize=["S", "G", "window", "chunk"])
def first_keys_kernel(
    layout,
    out,
    S,
    G,
    window,
    chunk,
    PAGE: tl.constexpr,
    NONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Writes row and seen of a slot's rows, and page of the source; one program per source."""
    source = tl.program_id(0)
    if source < G:
        tokens = tl.load(layout.prompt_len + source)
        begin = tl.load(layout.group_start + source)
        end = tl.load(layout.group_start + source + 1)
        least = tl.full((), NONE, tl.int32)
        for z in range(0, S, BLOCK):
            # [BLOCK]
            s = z + tl.arange(0, BLOCK)
            start = tl.load(layout.slot_start + s, mask=s < S, other=0)
            nodes = tl.load(layout.slot_nodes + s, mask=s < S, other=0)
            length = tl.load(layout.slot_len + s, mask=s < S, other=0)
            mine = (nodes > 0) & (begin <= start) & (start < end)
            least = tl.minimum(least, tl.min(tl.where(mine, length, NONE), 0))
        first = _first(tl.minimum(tokens + least, NONE), window, chunk)
    else:
        slot = source - G
        tokens = tl.load(layout.slot_len + slot)
        begin = tl.load(layout.slot_start + slot)
        nodes = tl.load(layout.slot_nodes + slot)
        prompt = tl.zeros((), tl.int32)
        for z in range(0, G, BLOCK):
            # [BLOCK]
            g = z + tl.arange(0, BLOCK)
            low = tl.load(layout.group_start + g, mask=g < G, other=0)
            high = tl.load(layout.group_start + g + 1, mask=g < G, other=0)
            length = tl.load(layout.prompt_len + g, mask=g < G, other=0)
            prompt += tl.sum(tl.where((low <= begin) & (begin < high), length, 0), 0)
        first = tl.maximum(_first(prompt + tokens, window, chunk) - prompt, 0)
        # [1, 64]
        b = tl.arange(0, 64)[None, :]
        for r in range(0, nodes, BLOCK_R):
            # [BLOCK_R]
            node = r + tl.arange(0, BLOCK_R)
            row = begin + node
            word = tl.load(layout.ancestors + row, mask=node < nodes, other=0)
            # [BLOCK_R, 64]
            bit = ((word[:, None] >> b.to(tl.int64)) & 1).to(tl.int32)
            # [BLOCK_R]
            own = _first(prompt + tokens + tl.sum(bit, 1) - 1, window, chunk)
            hidden = own - prompt - tokens
            visible = (bit == 1) & (tl.cumsum(bit, 1) > hidden[:, None])
            seen = tl.sum(tl.where(visible, bit.to(tl.int64) << b.to(tl.int64), 0), 1)
            tl.store(out.row + row * 2, own, mask=node < nodes)
            tl.store(out.row + row * 2 + 1, tl.maximum(own - prompt, 0), mask=node < nodes)
            tl.store(out.seen + row, seen, mask=node < nodes)
    page = tl.where(first < tokens, first // PAGE, tl.cdiv(tokens, PAGE))
    tl.store(out.page + source, page)


def first_keys_triton(layout: TreeLayout, window: int | None, chunk: int | None) -> FirstKeys:
    """One launch. Entries that are never read are not written."""
    made = empty_first_keys(layout)
    S, G = layout.slot_len.shape[0], layout.prompt_len.shape[0]
    first_keys_kernel[(G + S,)](
        layout=layout,
        out=made,
        S=S,
        G=G,
        window=window or NONE,
        chunk=chunk or NONE,
        PAGE=PAGE,
        NONE=NONE,
        BLOCK=64,
        BLOCK_R=16,
        num_warps=4,
    )
    return made


def _fake(layout: TreeLayout, window: int | None, chunk: int | None) -> FirstKeys:
    return empty_first_keys(layout)


_first_keys = RecordOperator(
    "first_keys",
    (LAYOUT, "SymInt? window", "SymInt? chunk"),
    first_keys_ref,
    first_keys_triton,
    returns="(Tensor, Tensor, Tensor)",
    fake=_fake,
)


def first_keys(
    layout: TreeLayout, window: int | None = None, chunk: int | None = None
) -> FirstKeys:
    """Returns the first keys of all rows.

    window: most keys that a row attends to, its own included. chunk: positions per chunk.
    """
    check_reach(window, chunk)
    check_layout(layout, layout.slot.shape[0], layout.slot.device)
    return FirstKeys(*_first_keys(layout, window, chunk))
