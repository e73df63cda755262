"""Tree attention in one call per layer; the formula is in `csd/kernels/attention`.

A group's rows are processed together. Each page of keys and values is read once (the prompt's
pages once per thread, the others once per slot) and used by all rows that attend to it, while the
next page is prefetched. A row's sums run over its slot's keys and then over the prompt's, in order
of position, and hidden nodes add exact zeros. So its result is a function of its own query, keys
and values, to the bit: an engine's is exact without further rules.

With a window, a chunk, a cap or sinks `weigh` computes a row's weights, by the formula of
`csd/kernels/attention/reference.py`. Keys before the first one that any of the rows sees are not
read. A row's sums begin at its own first key: earlier keys get weights of zero and do not affect
the order in which later ones are added.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic, overload

from csd.kernels.attention.cpu.pages import (
    BYTES,
    PAGE,
    add_pages,
    add_values,
    of_head,
    page_of,
    score_keys,
    score_pages,
    workspace,
    workspace_bytes,
)
from csd.kernels.attention.cpu.softmax import softmax
from csd.kernels.attention.layout import TreeLayout
from csd.kernels.numba.isa import instruction
from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import BLOCK, WIDTH
from csd.kernels.numba.math import exp
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require, rounded
from csd.kernels.numba.threads import by_threads, share, threads
from csd.kernels.numba.tiles import ISA

# tanh(x) = x + x z P(z), z = x^2, P by least squares of the relative error up to 0.625
NEAR = 0.6
FACTORS = tuple(
    np.float32(x) for x in (-5.71705e-3, 2.0650593e-2, -5.37435e-2, 0.13331491, -0.33333284)
)


class Properties(NamedTuple):
    """Properties of a call in the form in which a loop takes them."""

    # 0 where there is none
    window: int
    chunk: int
    softcap: float
    sinks: np.ndarray  # [H], or [0]


def properties_of(
    kind: type,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> Properties | None:
    """A call's properties, None for a plain call; kind: numpy's type of the scores."""
    if window is chunk is softcap is sinks is None:
        return None
    sink_scores = (
        np.empty(0, kind) if sinks is None else sinks.detach().double().numpy().astype(kind)
    )
    return Properties(window or 0, chunk or 0, kind(softcap or 0), sink_scores)


def first_key(properties: Any, old: int, word: int) -> int:
    """Position of the first key that a row sees, after `old` tokens; word: bits of its path."""


@overload(first_key)
def _first_key(properties, old, word):
    if isinstance(properties, types.NoneType):
        return lambda properties, old, word: 0

    def first(properties, old, word):
        position, begin = old + count(word) - 1, 0
        if properties.window:
            begin = max(position - properties.window + 1, 0)
        if properties.chunk:
            begin = max(position - position % properties.chunk, begin)
        return begin

    return first


@loop
def first_own(properties, prompt, length):
    """Index of the first committed token that a tree's root sees; other rows see no earlier one."""
    return min(max(first_key(properties, prompt + length, 1) - prompt, 0), length)


@loop
def weigh(x, scale, old, nodes, word, sums, first, properties, head):
    """`softmax` over the keys from column `first` on; earlier keys get weights of zero.

    first may exceed `old`, the number of keys before the nodes: then the earliest nodes of the
    row's path are hidden. Returns the sum of the weights, with that of the head's sink.
    """
    hidden = min(first, old)
    for _ in range(first - hidden):
        word &= word - 1
    x[:hidden] = 0
    shown = x[hidden:]
    if properties.softcap > 0:
        for j in range(old - hidden + nodes):
            shown[j] = properties.softcap * tanh(shown[j] * scale / properties.softcap)
        scale = type(scale)(1)
    total, peak = softmax(shown, scale, old - hidden, nodes, word, sums)
    if properties.sinks.shape[0]:
        total += exp(properties.sinks[head] - peak * scale)
    return total


def tanh(x: Any) -> Any:
    """tanh x; in float32 within two ulp."""


@overload(tanh)
def _tanh(x):
    if x == types.float64:
        return lambda x: math.tanh(x)
    border, one = np.float32(NEAR), np.float32(1)
    a, b, c, d, e = FACTORS

    def single(x):
        z = x * x
        near = x + x * (z * ((((a * z + b) * z + c) * z + d) * z + e))
        size = abs(x)
        far = one - (one + one) / (exp(size + size) + one)
        return near if size < border else (far if x > 0 else -far)

    return single


@intrinsic
def count(typing_context, word):
    """Number of set bits of a word."""
    return types.int64(types.int64), lambda _, builder, __, args: builder.ctpop(args[0])


@by_threads
def attend_rows(
    part,
    parts,
    shape,  # M, H, K, D, Dv, n_pages
    q,  # [M, H, D]
    node_k,  # [M, K, D]
    node_v,  # [M, K, Dv]
    k_pages,  # [n_pages, 64, K, D]
    v_pages,  # [n_pages, 64, K, Dv]
    out,  # [M, H, Dv], written
    kinds,  # `attention_kinds` of the dtype and D
    scale,
    properties,  # from `properties_of`; numba compiles a separate version for None
    shares,  # from `shares`: numbers of parts of a group's heads and of its rows
    layout,  # from `plan_attention`
):
    """Attention of all rows; q, keys, values and `out` are addresses."""
    M, H, K, D, Dv, pages = shape
    prompt_pages, prompt_len, slot_pages, slot_len = layout[:4]
    slot, ancestors, slot_start, slot_nodes, group_start, groups = layout[4:]
    like, key_like, isa = kinds
    words = D * like.itemsize // key_like.itemsize
    q, out = memory(q, (M, H, words), key_like), memory(out, (M, H, Dv), like)
    node_k, node_v = memory(node_k, (M, K, words), key_like), memory(node_v, (M, K, Dv), like)
    # pages of keys and of values, as numbers and as bytes
    tokens = pages, PAGE, K
    keys = (
        memory(k_pages, (*tokens, words), key_like),
        memory(k_pages, (*tokens, D * like.itemsize), BYTES),
    )
    values = (
        memory(v_pages, (*tokens, Dv), like),
        memory(v_pages, (*tokens, Dv * like.itemsize), BYTES),
    )
    each, (sides, cuts) = H // K, shares
    numbers = np.empty(0, type(scale))
    begun, ended = share(len(groups) * sides * cuts, part, parts)
    for unit in range(begun, ended):
        g, side, cut = groups[unit // cuts // sides], unit // cuts % sides, unit % cuts
        begin, rows = group_start[g], group_start[g + 1] - group_start[g]
        first, last = begin + rows * cut // cuts, begin + rows * (cut + 1) // cuts
        if first == last:
            continue
        heads = side * K // sides, (side + 1) * K // sides
        # rows of one head, and of all heads, ordered by head
        rows = (last - first) * each
        many, prompt, own = rows * (heads[1] - heads[0]), prompt_len[g], 0
        # the first position that a root sees: rows below a root see no earlier one
        front = np.int64(1 << 40)
        for m in range(first, last):
            own = max(own, slot_len[slot[m]] + slot_nodes[slot[m]])
            front = min(front, first_key(properties, prompt + slot_len[slot[m]], 1))
        wide = -(-max(D, Dv) // WIDTH) * WIDTH
        # prompt | committed | nodes, from position `front` on, padded to whole vectors
        columns = -(-(prompt - front + own + PAGE) // BLOCK) * BLOCK
        buffer = np.empty(workspace_bytes(many, words, columns, wide, numbers), np.uint8)
        query, score, sums, total, lanes, work = workspace(
            buffer.ctypes.data, many, words, columns, wide, numbers
        )
        for i in range(many):
            row = q[first + i % rows // each, (heads[0] + i // rows) * each + i % each]
            for d in range(words):
                query[i, d] = read(row[d])
        whole, s = (0, rows, rows), slot[first]
        shared = prompt_pages[g], min(front, prompt), prompt
        first_seen = first_own(properties, prompt, slot_len[s])
        then = page_of(keys[1], slot_pages[s], slot_len[s], first_seen)
        score_pages(keys, shared, then, heads, whole, -front, query, score, work, isa)
        m = first
        while m < last:
            s = slot[m]
            start, nodes, length = slot_start[s], slot_nodes[s], slot_len[s]
            stop, old = min(start + nodes, last), prompt - front + length
            committed = slot_pages[s], first_own(properties, prompt, length), length
            some = (m - first) * each, (stop - first) * each, rows
            then = page_of(values[1], slot_pages[s], length, committed[1])
            offset = prompt - front
            score_pages(keys, committed, then, heads, some, offset, query, score, work, isa)
            for h in range(heads[0], heads[1]):
                low, high = of_head(h, heads, some)
                near = node_k[start : start + nodes]
                score_keys(near, h, low, high, old, query, score, work, isa)
                for i in range(low, high):
                    word = ancestors[first + i % rows // each]
                    if properties is None:
                        total[i] = softmax(score[i], scale, old, nodes, word, lanes)[0]
                    else:
                        sees = first_key(properties, prompt + length, word) - front
                        head = h * each + i % each
                        total[i] = weigh(
                            score[i], scale, old, nodes, word, lanes, sees, properties, head
                        )
            if stop < last:
                s = slot[stop]
                first_seen = first_own(properties, prompt, slot_len[s])
                then = page_of(keys[1], slot_pages[s], slot_len[s], first_seen)
            else:
                then = page_of(values[1], prompt_pages[g], prompt, front)
            add_pages(values, committed, then, heads, some, offset, score, sums, work, isa)
            for h in range(heads[0], heads[1]):
                low, high = of_head(h, heads, some)
                near = node_v[start : start + nodes]
                add_values(near, h, low, high, old, score, sums, work, isa)
            m = stop
        add_pages(values, shared, keys[1][0, :0], heads, whole, -front, score, sums, work, isa)
        for i in range(many):
            y = out[first + i % rows // each, (heads[0] + i // rows) * each + i % each]
            for d in range(Dv):
                y[d] = rounded(sums[i, d] / total[i], like)
        # numba frees an array after its last use: this one keeps it while its parts are used
        buffer[0] = 0


def attention_kinds(
    dtype: torch.dtype, D: int, isa: str | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Types in which `attend_rows` reads values and keys, and its instruction, one of `tiles.ISA`.

    D: size of a head's keys and values, or the greatest common divisor of the keys' size and twice
    the values' size. isa: name of an instruction; by default this CPU's if it suits D, else "fma".
    """
    taken = instruction(dtype)
    in_pairs = taken == "dot" and D % (2 * BLOCK) == 0
    isa = isa or (taken if in_pairs else "fma")
    return LIKE[dtype], LIKE[dtype if isa == "fma" else torch.float32], ISA[isa]


def shares(rows: tuple[np.ndarray, ...], kv_heads: int) -> tuple[int, int]:
    """Numbers of parts into which a group's heads and rows are divided, to balance the threads.

    rows: result of `plan_attention`. A token's heads are adjacent in memory, so they are not
    divided where there are enough slots for all threads.
    """
    slots = int((rows[-3] > 0).sum())
    count, groups = threads(), len(rows[-1])
    sides = 1 if slots >= 2 * count else kv_heads
    return sides, count // math.gcd(groups * sides, count)


def plan_attention(heads: int, kv_heads: int, **layout: Any) -> tuple[np.ndarray, ...]:
    """A step's layout as the loop takes it: the arrays of a `TreeLayout`, and the groups with rows.

    layout: tensors by name, those of a `TreeLayout` and others, which are ignored.
    """
    arrays = tuple(layout[name].numpy() for name in TreeLayout._fields)
    return *arrays, np.flatnonzero(np.diff(arrays[-1]))


def tree_attention(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
    work: tuple[np.ndarray, ...] | None = None,
    out: torch.Tensor | None = None,
    **layout: torch.Tensor,
) -> torch.Tensor:
    """Attention of all rows, as `tree_attention_ref` defines it; returns [M, H, Dv].

    work: result of `plan_attention` for the step, made from `layout` if None. out: tensor to write
    and return. Raises TypeError for tensors that loops do not read.
    """
    operands = q, node_k, node_v, k_pages, v_pages
    require(readable(*operands), "tree_attention", *operands)
    (M, H, D), (K, Dv), pages = q.shape, node_v.shape[1:], k_pages.shape[0]
    out = q.new_empty(M, H, Dv) if out is None else out
    rows = work or plan_attention(H, 0, **layout)
    out[int(rows[-2][-1]) :].zero_()
    tensors = [x.contiguous() for x in operands]
    dense = out if out.is_contiguous() else torch.empty_like(out)
    kind = np.float64 if q.dtype == torch.float64 else np.float32
    attend_rows(
        M * H * D * PAGE,
        (M, H, K, D, Dv, pages),
        *(x.data_ptr() for x in (*tensors, dense)),
        attention_kinds(q.dtype, math.gcd(D, 2 * Dv)),
        kind(scale),
        properties_of(kind, window, chunk, softcap, sinks),
        shares(rows, K),
        rows,
    )
    return out if out is dense else out.copy_(dense)
