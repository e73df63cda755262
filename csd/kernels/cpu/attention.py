"""Tree attention in one call a layer; the formula is in `csd/kernels/tree_attention`.

A group's rows are read together: of each page of keys and values, of the prompt's once a group and
of the others once a slot, all rows that attend to it take what they need. A row's sums run over its
slot's keys and then over the prompt's, in order of position, and hidden nodes add exact zeros. So
its result is a function of its own query, keys and values, to the bit: an engine's is exact with no
further rule.
"""

import numpy as np
import torch
from numba import prange

from csd.kernels.cpu import instruction
from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.head_products import PAGE, add_values, score_keys
from csd.kernels.cpu.lanes import BLOCK, WIDTH, fetch
from csd.kernels.cpu.numbers import LIKE, memory, read, readable, rounded
from csd.kernels.cpu.softmax import softmax
from csd.kernels.cpu.threads import by_threads, parts
from csd.kernels.cpu.tiles import BY
from csd.kernels.tree_attention.batched import tree_attention_batched

# bytes of a line of a CPU's cache
LINE = 64


@by_threads
def _attend(
    shape,  # M, H, K, D, n_pages
    q,  # [M, H, D]
    node_k,  # [M, K, D]
    node_v,  # [M, K, D]
    k_pages,  # [n_pages, 64, K, D]
    v_pages,  # [n_pages, 64, K, D]
    out,  # [M, H, D], written
    kinds,  # `attention_kinds` of the dtype and D
    scale,
    parts,  # of a group's slots, each by itself
    prompt_pages,  # [G, PP] int32
    prompt_len,  # [G] int32
    slot_pages,  # [S, SP] int32
    slot_len,  # [S] int32
    slot,  # [M] int32
    ancestors,  # [M] int64
    slot_nodes,  # [S] int32
    group_start,  # [G + 1] int32
    groups,  # those that have rows
):
    M, H, K, D, pages = shape
    like, key_like, by = kinds
    words = D * like.itemsize // key_like.itemsize
    q, out = memory(q, (M, H, words), key_like), memory(out, (M, H, D), like)
    node_k, node_v = memory(node_k, (M, K, words), key_like), memory(node_v, (M, K, D), like)
    k_pages = memory(k_pages, (pages, PAGE, K, words), key_like)
    v_pages = memory(v_pages, (pages, PAGE, K, D), like)
    each = H // K
    for unit in prange(len(groups) * K * parts):
        g, h = groups[unit // parts // K], unit // parts % K
        bounds = group_start[g], group_start[g + 1]
        first, last = _share(*bounds, slot, slot_nodes, unit % parts, parts)
        rows, prompt, own = (last - first) * each, prompt_len[g], 0
        for m in range(first, last):
            own = max(own, slot_len[slot[m]] + slot_nodes[slot[m]])
        wide = -(-D // WIDTH) * WIDTH
        query, sums = np.empty((rows, words), type(scale)), np.zeros((rows, wide), type(scale))
        # a row's keys: prompt | committed | nodes, and room for whole lanes
        score = np.empty((rows, prompt + own + PAGE), type(scale))
        total, work = np.empty(rows, type(scale)), np.empty(WIDTH, type(scale))
        # zeros, since products run over whole lanes: numbers that nobody reads may be denormal, and
        # each of those takes a hundred times as long
        tile, pairs = np.zeros(PAGE * wide, type(scale)), np.empty((rows, PAGE // 2), type(scale))
        for i in range(rows):
            row = q[first + i // each, h * each + i % each]
            for d in range(words):
                query[i, d] = read(row[d])
        _score(prompt_pages[g], prompt, k_pages, h, 0, rows, 0, query, score, tile, by)
        m = first
        while m < last:
            s, nodes = slot[m], slot_nodes[slot[m]]
            low, high, old = (m - first) * each, (m - first + nodes) * each, prompt + slot_len[s]
            pages, length = slot_pages[s], slot_len[s]
            _fetch(pages, length, v_pages, h)
            if m + nodes < last:
                follows = slot[m + nodes]
                _fetch(slot_pages[follows], slot_len[follows], k_pages, h)
            _score(pages, length, k_pages, h, low, high, prompt, query, score, tile, by)
            score_keys(node_k[m : m + nodes], h, low, high, old, query, score, tile, by)
            for i in range(low, high):
                word = ancestors[first + i // each]
                total[i] = softmax(score[i], scale, old, nodes, word, work)
            _add(pages, length, v_pages, h, low, high, prompt, score, pairs, sums, tile, by)
            add_values(node_v[m : m + nodes], h, low, high, old, score, pairs, sums, tile, by)
            m += nodes
        _add(prompt_pages[g], prompt, v_pages, h, 0, rows, 0, score, pairs, sums, tile, by)
        for i in range(rows):
            y = out[first + i // each, h * each + i % each]
            for d in range(D):
                y[d] = rounded(sums[i, d] / total[i], like)


@loop
def _share(first, last, slot, slot_nodes, part, parts):
    """Rows of the slots that begin in a part of rows first to last."""
    m, low, high = first, last, last
    while m < last:
        nodes = slot_nodes[slot[m]]
        if (m - first) * parts // (last - first) == part:
            low, high = min(low, m), m + nodes
        m += nodes
    return low, high


@loop
def _fetch(table, length, pages, h):
    """Asks for the lines of a head's keys or values, which `_walk` reads next."""
    _, _, K, D = pages.shape
    line = LINE // pages.itemsize
    for done in range(0, length, PAGE):
        page = pages[table[done // PAGE]]
        for t in range(min(PAGE, length - done)):
            for d in range(0, D, line):
                fetch(page, (t * K + h) * D + d)


@loop
def _score(table, length, pages, h, low, high, at, query, score, tile, by):
    """`score_keys` of the first `length` tokens that a table of pages holds."""
    for done in range(0, length, PAGE):
        page = pages[table[done // PAGE], : min(PAGE, length - done)]
        score_keys(page, h, low, high, at + done, query, score, tile, by)


@loop
def _add(table, length, pages, h, low, high, at, weight, pairs, sums, tile, by):
    """`add_values` of them."""
    for done in range(0, length, PAGE):
        page = pages[table[done // PAGE], : min(PAGE, length - done)]
        add_values(page, h, low, high, at + done, weight, pairs, sums, tile, by)


LAYOUT = (
    "prompt_pages", "prompt_len", "slot_pages", "slot_len", "slot", "ancestors", "slot_nodes",
    "group_start",
)  # fmt: skip


def attention_kinds(
    dtype: torch.dtype, D: int, by: str | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `_attend` reads values and keys as, and by what it multiplies them, of `tiles.BY`.

    by: an instruction, else this CPU's where it multiplies heads of D numbers.
    """
    in_pairs = instruction(dtype) == "dot" and D % (2 * BLOCK) == 0
    by = by or ("dot" if in_pairs else "fma")
    return LIKE[dtype], LIKE[torch.float32 if by == "dot" else dtype], BY[by]


def plan_attention(heads: int, kv_heads: int, **layout: torch.Tensor) -> tuple[np.ndarray, ...]:
    """A step's layout as the loop takes it; layout: `LAYOUT`'s tensors and others."""
    arrays = tuple(layout[name].numpy() for name in LAYOUT)
    return *arrays, np.flatnonzero(np.diff(arrays[-1]))


def tree_attention(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, D]
    *,
    scale: float,
    work: tuple[np.ndarray, ...] | None = None,
    out: torch.Tensor | None = None,
    **layout: torch.Tensor,
) -> torch.Tensor:
    """`tree_attention_batched`; work: `plan_attention` of the step."""
    if not readable(q, node_k, node_v, k_pages, v_pages):
        return tree_attention_batched(
            q, node_k, node_v, k_pages, v_pages, **layout, scale=scale, out=out
        )
    out = torch.empty_like(q) if out is None else out
    M, H, D = q.shape
    K, pages, rows = node_k.shape[1], k_pages.shape[0], work or plan_attention(H, 0, **layout)
    *_, group_start, groups = rows
    out[int(group_start[-1]) :].zero_()
    tensors = [x.contiguous() for x in (q, node_k, node_v, k_pages, v_pages)]
    dense = out if out.is_contiguous() else torch.empty_like(q)
    kind = np.float64 if q.dtype == torch.float64 else np.float32
    _attend(
        M * H * D * PAGE, (M, H, K, D, pages), *(x.data_ptr() for x in (*tensors, dense)),
        attention_kinds(q.dtype, D), kind(scale), parts(len(groups) * K), *rows,
    )  # fmt: skip
    return out if out is dense else out.copy_(dense)
