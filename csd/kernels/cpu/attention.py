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

from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.lanes import BLOCK, WIDTH, add_multiple, block, fetch, lanes, put, turn, widen
from csd.kernels.cpu.numbers import LIKE, memory, read, readable, rounded
from csd.kernels.cpu.softmax import softmax
from csd.kernels.cpu.threads import by_threads, parts
from csd.kernels.tree_attention.batched import tree_attention_batched

PAGE = 64
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
    like,
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
    q, out = memory(q, (M, H, D), like), memory(out, (M, H, D), like)
    node_k, node_v = memory(node_k, (M, K, D), like), memory(node_v, (M, K, D), like)
    k_pages = memory(k_pages, (pages, PAGE, K, D), like)
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
        query, sums = np.empty((rows, D), type(scale)), np.zeros((rows, wide), type(scale))
        # a row's keys: prompt | committed | nodes, and room for whole lanes
        score = np.empty((rows, prompt + own + PAGE), type(scale))
        total, work = np.empty(rows, type(scale)), np.empty(WIDTH, type(scale))
        # zeros, since products run over whole lanes: numbers that nobody reads may be denormal, and
        # each of those takes a hundred times as long
        tile = np.zeros(PAGE * wide, type(scale))
        for i in range(rows):
            row = q[first + i // each, h * each + i % each]
            for d in range(D):
                query[i, d] = read(row[d]) * scale
        _walk(False, prompt_pages[g], prompt, k_pages, h, 0, rows, 0, query, score, tile)
        m = first
        while m < last:
            s, nodes = slot[m], slot_nodes[slot[m]]
            low, high, old = (m - first) * each, (m - first + nodes) * each, prompt + slot_len[s]
            pages, length = slot_pages[s], slot_len[s]
            _fetch(pages, length, v_pages, h)
            if m + nodes < last:
                follows = slot[m + nodes]
                _fetch(slot_pages[follows], slot_len[follows], k_pages, h)
            _walk(False, pages, length, k_pages, h, low, high, prompt, query, score, tile)
            _scores(node_k[m : m + nodes], h, low, high, old, query, score, tile)
            for i in range(low, high):
                word = ancestors[first + i // each]
                total[i] = softmax(score[i], old, nodes, word, work)
            _walk(True, pages, length, v_pages, h, low, high, prompt, score, sums, tile)
            _values(node_v[m : m + nodes], h, low, high, old, score, sums, tile)
            m += nodes
        _walk(True, prompt_pages[g], prompt, v_pages, h, 0, rows, 0, score, sums, tile)
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
def _walk(values, table, length, pages, h, low, high, at, x, y, tile):
    """`_values` or `_scores` of the first `length` tokens that a table of pages holds."""
    for done in range(0, length, PAGE):
        page = pages[table[done // PAGE], : min(PAGE, length - done)]
        if values:
            _values(page, h, low, high, at + done, x, y, tile)
        else:
            _scores(page, h, low, high, at + done, x, y, tile)


@loop
def _scores(keys, h, low, high, at, query, score, tile):
    """score[low:high, at : at + len(keys)] = query times keys; what follows may be overwritten."""
    count, K, D = keys.shape
    whole = D // BLOCK * BLOCK
    for j in range(0, count, BLOCK):
        for d in range(0, whole, BLOCK):
            turn(keys, (j * K + h) * D + d, K * D, count - 1 - j, tile, d * PAGE + j, PAGE)
    for j in range(count):
        for d in range(whole, D):
            tile[d * PAGE + j] = read(keys[j, h, d])
    for i in range(low, high):
        score[i, at : at + -(-count // BLOCK) * BLOCK] = 0
    _add_product(query, low, high, 0, D, tile, PAGE, count, score, at)


@loop
def _values(values, h, low, high, at, weight, sums, tile):
    """sums[low:high] += weight[low:high, at : at + len(values)] times values, key after key."""
    count, K, D = values.shape
    wide, whole = sums.shape[1], D // BLOCK * BLOCK
    for j in range(count):
        for d in range(0, whole, BLOCK):
            widen(values, (j * K + h) * D + d, tile, j * wide + d)
        for d in range(whole, D):
            tile[j * wide + d] = read(values[j, h, d])
    _add_product(weight, low, high, at, count, tile, wide, D, sums, 0)


@loop
def _add_product(x, low, high, x_at, terms, tile, wide, columns, y, y_at):
    """y[low:high, y_at:] += x[low:high, x_at:] tile, a term after another, each rounded once.

    x: `terms` numbers a row; tile: [terms, wide], of which `columns` are taken. The sums of four
    rows stay in registers, or in a last block of columns those of eight; where fewer are left, the
    last one is done more than once.
    """
    stride, end = y.shape[1], x_at + terms
    # three blocks one by one take less time than four together
    whole = (columns + BLOCK - 1) // WIDTH * WIDTH
    for i in range(low, high, 4):
        j, k, l = min(i + 1, high - 1), min(i + 2, high - 1), min(i + 3, high - 1)
        xi, xj, xk, xl = x[i, x_at:end], x[j, x_at:end], x[k, x_at:end], x[l, x_at:end]
        for at in range(0, whole, WIDTH):
            to = y_at + at
            yi, yj = lanes(y, i * stride + to), lanes(y, j * stride + to)
            yk, yl = lanes(y, k * stride + to), lanes(y, l * stride + to)
            for t in range(terms):
                row = lanes(tile, t * wide + at)
                yi, yj = add_multiple(yi, xi[t], row), add_multiple(yj, xj[t], row)
                yk, yl = add_multiple(yk, xk[t], row), add_multiple(yl, xl[t], row)
            put(yi, y, i * stride + to)
            put(yj, y, j * stride + to)
            put(yk, y, k * stride + to)
            put(yl, y, l * stride + to)
    for at in range(whole, columns, BLOCK):
        for i in range(low, high, 8):
            _eight_rows(x, i, high - 1, x_at, terms, tile, wide, at, y, y_at + at)


@loop
def _eight_rows(x, i, last, x_at, terms, tile, wide, at, y, to):
    """A block of columns of `_add_product` for rows i to i + 7, or to the last one."""
    stride, end = y.shape[1], x_at + terms
    j, k, l, m = min(i + 1, last), min(i + 2, last), min(i + 3, last), min(i + 4, last)
    n, o, p = min(i + 5, last), min(i + 6, last), min(i + 7, last)
    xi, xj, xk, xl = x[i, x_at:end], x[j, x_at:end], x[k, x_at:end], x[l, x_at:end]
    xm, xn, xo, xp = x[m, x_at:end], x[n, x_at:end], x[o, x_at:end], x[p, x_at:end]
    yi, yj = block(y, i * stride + to), block(y, j * stride + to)
    yk, yl = block(y, k * stride + to), block(y, l * stride + to)
    ym, yn = block(y, m * stride + to), block(y, n * stride + to)
    yo, yp = block(y, o * stride + to), block(y, p * stride + to)
    for t in range(terms):
        row = block(tile, t * wide + at)
        yi, yj = add_multiple(yi, xi[t], row), add_multiple(yj, xj[t], row)
        yk, yl = add_multiple(yk, xk[t], row), add_multiple(yl, xl[t], row)
        ym, yn = add_multiple(ym, xm[t], row), add_multiple(yn, xn[t], row)
        yo, yp = add_multiple(yo, xo[t], row), add_multiple(yp, xp[t], row)
    put(yi, y, i * stride + to)
    put(yj, y, j * stride + to)
    put(yk, y, k * stride + to)
    put(yl, y, l * stride + to)
    put(ym, y, m * stride + to)
    put(yn, y, n * stride + to)
    put(yo, y, o * stride + to)
    put(yp, y, p * stride + to)


LAYOUT = (
    "prompt_pages", "prompt_len", "slot_pages", "slot_len", "slot", "ancestors", "slot_nodes",
    "group_start",
)  # fmt: skip


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
        LIKE[q.dtype], kind(scale), parts(len(groups) * K), *rows,
    )  # fmt: skip
    return out if out is dense else out.copy_(dense)
