"""Tree attention in one call a layer; the formula is in `csd/kernels/tree_attention`.

A group's rows are read together: of each page of keys and values, of the prompt's once a group and
of the others once a slot, all rows that attend to it take what they need. A row's sums run over its
keys in order of position, one after another, and hidden nodes add exact zeros. So its result is a
function of its own query, keys and values, to the bit: an engine's is exact with no further rule.
"""

import numpy as np
import torch

from csd.kernels.cpu.numbers import DTYPES, added, array, exp, fma, loop, peak, read, rounded
from csd.kernels.tree_attention.batched import tree_attention_batched

PAGE = 64


@loop
def _attend(
    q,  # [M, H, D]
    node_k,  # [M, K, D]
    node_v,  # [M, K, D]
    k_pages,  # [n_pages, 64, K, D]
    v_pages,  # [n_pages, 64, K, D]
    prompt_pages,  # [G, PP] int32
    prompt_len,  # [G] int32
    slot_pages,  # [S, SP] int32
    slot_len,  # [S] int32
    slot,  # [M] int32
    ancestors,  # [M] int64
    slot_nodes,  # [S] int32
    group_start,  # [G + 1] int32
    scale,
    out,  # [M, H, D], written
):
    K, D = node_k.shape[1:]
    each = q.shape[1] // K
    tile = np.empty((D, PAGE), type(scale))
    groups = group_start.shape[0] - 1
    for unit in range(groups * K):
        g, h = unit // K, unit % K
        first, rows = group_start[g], group_start[g + 1] - group_start[g]
        if not rows:
            continue
        prompt, longest = prompt_len[g], 0
        for m in range(first, first + rows):
            longest = max(longest, slot_len[slot[m]] + slot_nodes[slot[m]])
        query = np.empty((rows * each, D), type(scale))
        for i in range(rows * each):
            for d in range(D):
                query[i, d] = read(q[first + i // each, h * each + i % each, d]) * scale
        # [rows * each, prompt | committed | nodes]
        score = np.empty((rows * each, prompt + longest), type(scale))
        for at in range(0, prompt, PAGE):
            count = min(PAGE, prompt - at)
            _turned(k_pages[prompt_pages[g, at // PAGE]], h, count, tile)
            _scores(query, tile, score, 0, rows * each, at, count)
        total, line = np.empty(rows * each, type(scale)), np.empty(prompt + longest, type(scale))
        m = first
        while m < first + rows:
            s = slot[m]
            low, high = (m - first) * each, (m - first + slot_nodes[s]) * each
            for at in range(0, slot_len[s], PAGE):
                count = min(PAGE, slot_len[s] - at)
                _turned(k_pages[slot_pages[s, at // PAGE]], h, count, tile)
                _scores(query, tile, score, low, high, prompt + at, count)
            old = prompt + slot_len[s]
            _turned(node_k[m : m + slot_nodes[s]], h, slot_nodes[s], tile)
            _scores(query, tile, score, low, high, old, slot_nodes[s])
            for i in range(low, high):
                word = ancestors[first + i // each]
                total[i] = _softmax(score[i, : old + slot_nodes[s]], old, word, line)
            m += slot_nodes[s]

        query[:] = 0
        for at in range(0, prompt, PAGE):
            count = min(PAGE, prompt - at)
            _widened(v_pages[prompt_pages[g, at // PAGE]], h, count, tile)
            _values(score, tile, query, 0, rows * each, at, count)
        m = first
        while m < first + rows:
            s = slot[m]
            low, high = (m - first) * each, (m - first + slot_nodes[s]) * each
            for at in range(0, slot_len[s], PAGE):
                count = min(PAGE, slot_len[s] - at)
                _widened(v_pages[slot_pages[s, at // PAGE]], h, count, tile)
                _values(score, tile, query, low, high, prompt + at, count)
            _widened(node_v[m : m + slot_nodes[s]], h, slot_nodes[s], tile)
            _values(score, tile, query, low, high, prompt + slot_len[s], slot_nodes[s])
            m += slot_nodes[s]
        for i in range(rows * each):
            for d in range(D):
                value = query[i, d] / total[i]
                out[first + i // each, h * each + i % each, d] = rounded(value, out)


@loop
def _turned(x, h, count, tile):
    """Keys x[:count, h] as columns of a tile [D, 64]."""
    for j in range(count):
        row = x[j, h]
        for d in range(row.shape[0]):
            tile[d, j] = read(row[d])


@loop
def _widened(x, h, count, tile):
    """Values x[:count, h] as rows, in the same memory."""
    D = x.shape[2]
    rows = tile.reshape((PAGE, D))
    for j in range(count):
        for d in range(D):
            rows[j, d] = read(x[j, h, d])


@loop
def _scores(query, tile, score, low, high, at, count):
    """score[low:high, at : at + count] = query tile, each a sum over d in order."""
    for i in range(low, high):
        y = score[i, at : at + count]
        y[:] = 0
        _add_product(y, query[i], tile)


@loop
def _values(weight, tile, total, low, high, at, count):
    """total[low:high] += weight[low:high, at : at + count] times the values, key after key."""
    rows = tile.reshape((PAGE, total.shape[1]))
    for i in range(low, high):
        _add_product(total[i], weight[i, at : at + count], rows)


@loop
def _add_product(y, x, rows):
    """y += x rows[: len(x)], a term after another, each rounded once.

    Eight terms a pass: y is then read and written an eighth as often.
    """
    width, whole = y.shape[0], x.shape[0] // 8 * 8
    for i in range(0, whole, 8):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        ra, rb, rc, rd = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        e, f, g, h = x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        re, rf, rg, rh = rows[i + 4], rows[i + 5], rows[i + 6], rows[i + 7]
        for j in range(width):
            z = fma(d, rd[j], fma(c, rc[j], fma(b, rb[j], fma(a, ra[j], y[j]))))
            y[j] = fma(h, rh[j], fma(g, rg[j], fma(f, rf[j], fma(e, re[j], z))))
    for i in range(whole, x.shape[0]):
        for j in range(width):
            y[j] = fma(x[i], rows[i, j], y[j])


@loop
def _softmax(x, old, word, line):
    """A row's weights in place of its scores, not divided by their sum, which is returned.

    old: keys before the nodes; word: the nodes that it attends to; line: as long as x, to work in.
    """
    for j in range(old, x.shape[0]):
        if not (word >> (j - old)) & 1:
            x[j] = -np.inf
    most = peak(x)
    for j in range(x.shape[0]):
        x[j] = exp(x[j] - most)
    # in order of position, whether a key is a node or committed
    line[:old] = x[:old]
    keys = old
    for j in range(old, x.shape[0]):
        if (word >> (j - old)) & 1:
            line[keys] = x[j]
            keys += 1
    return added(line[:keys])


LAYOUT = (
    "prompt_pages", "prompt_len", "slot_pages", "slot_len", "slot", "ancestors", "slot_nodes",
    "group_start",
)  # fmt: skip


def plan_attention(heads: int, kv_heads: int, **layout: torch.Tensor) -> tuple[np.ndarray, ...]:
    """A step's layout as the loop takes it; layout: `LAYOUT`'s tensors and others."""
    return tuple(layout[name].numpy() for name in LAYOUT)


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
    if q.dtype not in DTYPES:
        return tree_attention_batched(
            q, node_k, node_v, k_pages, v_pages, **layout, scale=scale, out=out
        )
    out = torch.empty_like(q) if out is None else out
    rows = work or plan_attention(q.shape[1], node_k.shape[1], **layout)
    out[int(rows[-1][-1]) :].zero_()
    kind = np.float64 if q.dtype == torch.float64 else np.float32
    tensors = (x.contiguous() for x in (q, node_k, node_v, k_pages, v_pages))
    _attend(*map(array, tensors), *rows, kind(scale), array(out))
    return out
