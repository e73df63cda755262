"""The first launch of the tree attention: partial results of every segment of the work list.

The formula and the conventions are in `csd/kernels/attention/`, the work list is in `plan.py`. The
steps in a tile of rows are functions of their own, which `exact.py` also calls: `_tokens` loads
keys or values, `_scores` multiplies, `_add_keys` is one step of the online softmax.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.state import kv_cache


@triton.jit
def _tokens(
    pages_ptr,
    start,
    kv,
    offs_n,
    mask_n,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D]: a head's keys or values from place `start` on, 0 where masked.

    Memory after the last valid token may be NaN, and 0 * NaN is not 0. mask_n: None for no mask.
    """
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    # [BLOCK_N, BLOCK_D]: 32-bit offsets from one pointer that all elements share
    offs = offs_n[:, None] * (K * D) + offs_d[None, :]
    ptrs = pages_ptr + (start * (K * D) + kv * D) + offs
    if mask_n is not None:
        x = tl.load(ptrs, mask=mask_n[:, None] & (offs_d < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0)
    return x.to(DTYPE)


@triton.jit
def _tanh(x):
    """tanh to two units in the last place, which 1 - 2 / (e^2x + 1) does not reach near zero."""
    z = x * x
    # least squares of the relative error up to 0.625
    p = tl.fma(z, -5.71705e-3, 2.0650593e-2)
    p = tl.fma(tl.fma(tl.fma(p, z, -5.37435e-2), z, 0.13331491), z, -0.33333284)
    near = tl.fma(x * z, p, x)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.6, near, tl.where(x > 0.0, far, -far))


@triton.jit
def _scores(q, k, scale, cap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """[R, N]: unscaled scores; with CAP scaled and capped, in base 2 if `cap` is times log2 e."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP:
        return cap * _tanh(score * scale)
    else:
        return score


@triton.jit
def _add_keys(acc, peak, total, score, v, scale, PRECISION: tl.constexpr):
    """One step of the online softmax: acc [R, D], peak [R], total [R], score [R, N], v [N, D].

    Scores and their peak are unscaled: one fma subtracts the peak and applies `scale`.
    """
    top = tl.maximum(peak, tl.max(score, 1))
    # a finite pivot keeps a row without a key so far from computing -inf - -inf
    pivot = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(score, scale, (-pivot * scale)[:, None]))
    # exactly 1 if the peak does not change
    shrink = tl.exp2((peak - pivot) * scale)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


class Operands(NamedTuple):
    """Queries, and keys and values of nodes and of pages."""

    q: torch.Tensor  # [M, H, D]
    node_k: torch.Tensor  # [M, K, D]
    node_v: torch.Tensor  # [M, K, DV]
    k_pages: torch.Tensor  # [n_pages, PAGE, K, D]
    v_pages: torch.Tensor  # [n_pages, PAGE, K, DV]

    @property
    def strides(self) -> "Strides":
        return Strides(*(x.stride(0) for x in self[:3]))


class Strides(NamedTuple):
    """Elements from a row to the next."""

    q: int
    node: int
    node_v: int


class Tiles(NamedTuple):
    """Constants of the attention's kernels."""

    H: int
    K: int
    D: int
    DV: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    PRECISION: str
    CAP: bool
    BLOCK_SMALL: int = 0
    PAGE: int = kv_cache.PAGE


@triton.jit
def _attend_tile(
    operands,
    ancestors,  # [M] int64; with a window, the nodes that a row attends to
    first_keys,  # [M, 2] int32 of `first_keys`, or None
    results,
    strides,
    segment,
    keys,
    packed,
    kv,
    scale,
    cap,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    """Writes the partial result of a segment for BLOCK_R packed rows of its tile, from `packed`."""
    o_ptr, lse_ptr = results
    first, rows, low, high, base = segment
    # row of the page table and tokens of the source; nodes is 0 if none are in the segment
    table_ptr, length, node_first, nodes, part = keys
    EACH: tl.constexpr = C.H // C.K
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_V: tl.constexpr = C.BLOCK_V
    PRECISION: tl.constexpr = C.PRECISION
    SUBS: tl.constexpr = C.PAGE // BLOCK_N
    # [BLOCK_R]
    offs_r = packed + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rows * EACH
    row = first + offs_r // EACH
    head = kv * EACH + offs_r % EACH
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < C.D
    # [BLOCK_V]
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < C.DV
    # [BLOCK_N]
    offs_n = tl.arange(0, BLOCK_N)
    # [BLOCK_R, BLOCK_D]
    q = tl.load(
        operands.q + row[:, None].to(tl.int64) * strides.q + head[:, None] * C.D + offs_d[None, :],
        mask=mask_r[:, None] & mask_d[None, :],
        other=0.0,
    ).to(DTYPE)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)

    # with a cap the scores are scaled already
    unit = 1.0 if C.CAP else scale
    pages = tl.cdiv(length, C.PAGE)
    end = tl.minimum(high, pages) * SUBS
    # the page of the next step is loaded a step ahead, so that its latency is not in the loop
    page = tl.load(table_ptr + low, mask=low < pages, other=0)
    # full pages need no mask, which takes a quarter of a page's instructions
    whole = tl.maximum(tl.minimum(length // C.PAGE, high), low) * SUBS
    if first_keys is not None:
        # [BLOCK_R, 1]: the first key of this source that a row attends to
        since = tl.load(first_keys + row * 2 + part, mask=mask_r, other=0)[:, None]
        whole = low * SUBS
    for i in range(low * SUBS, whole):
        start = page.to(tl.int64) * C.PAGE + (i % SUBS) * BLOCK_N
        page = tl.load(table_ptr + (i + 1) // SUBS, mask=i + 1 < end, other=0)
        k = _tokens(operands.k_pages, start, kv, offs_n, None, C.K, C.D, BLOCK_D, DTYPE)
        v = _tokens(operands.v_pages, start, kv, offs_n, None, C.K, C.DV, BLOCK_V, DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, C.CAP, PRECISION)
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)
    for i in range(whole, end):
        token = i * BLOCK_N + offs_n
        mask_n = token < length
        start = page.to(tl.int64) * C.PAGE + (i % SUBS) * BLOCK_N
        page = tl.load(table_ptr + (i + 1) // SUBS, mask=i + 1 < end, other=0)
        k = _tokens(operands.k_pages, start, kv, offs_n, mask_n, C.K, C.D, BLOCK_D, DTYPE)
        v = _tokens(operands.v_pages, start, kv, offs_n, mask_n, C.K, C.DV, BLOCK_V, DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, C.CAP, PRECISION)
        if first_keys is not None:
            seen = mask_n[None, :] & (token[None, :] >= since)
            score = tl.where(seen, score, float("-inf"))
        else:
            score = tl.where(mask_n[None, :], score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)

    # [BLOCK_R, 1]
    word = tl.load(ancestors + row, mask=mask_r & (nodes > 0), other=0)[:, None]
    # seldom more than one iteration, so more stages would only add code
    for j in tl.range(0, nodes, BLOCK_N, num_stages=2):
        node = j + offs_n
        mask_n = node < nodes
        # [BLOCK_N, 1]
        node_row = (node_first + node)[:, None].to(tl.int64)
        offs = node_row * strides.node + kv * C.D + offs_d[None, :]
        mask = mask_n[:, None] & mask_d[None, :]
        k = tl.load(operands.node_k + offs, mask=mask, other=0.0).to(DTYPE)
        if C.DV != C.D:
            offs = node_row * strides.node_v + kv * C.DV + offs_v[None, :]
        mask = mask_n[:, None] & mask_v[None, :]
        v = tl.load(operands.node_v + offs, mask=mask, other=0.0).to(DTYPE)
        # [BLOCK_R, BLOCK_N]
        score = _scores(q, k, scale, cap, C.CAP, PRECISION)
        seen = ((word >> node[None, :].to(tl.int64)) & 1) == 1
        score = tl.where(seen & mask_n[None, :], score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, unit, PRECISION)

    # a row without a key (only sub-blocks of other branches, or all before its window) has weight 0
    # in the merge
    total = tl.where(total > 0.0, total, 1.0)
    index = base + offs_r
    tl.store(
        o_ptr + index[:, None].to(tl.int64) * C.DV + offs_v[None, :],
        acc * (1.0 / total)[:, None],
        mask=mask_r[:, None] & mask_v[None, :],
    )
    tl.store(lse_ptr + index, peak * unit + tl.log2(total), mask=mask_r)


@triton.jit(do_not_specialize=["G", "prompt_width", "slot_width", "partial_rows"])
def _tree_attention_kernel(
    operands,
    layout,  # with a window, `ancestors` has the nodes that a row attends to
    work,
    partials,  # out
    strides,
    G,
    prompt_width,
    slot_width,
    partial_rows,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    K: tl.constexpr = C.K
    EACH: tl.constexpr = C.H // K
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_SMALL: tl.constexpr = C.BLOCK_SMALL
    # neighbouring programs read neighbouring heads of the same tokens
    pid = tl.program_id(0) // K
    kv = tl.program_id(0) % K
    o_ptr = partials.o + kv.to(tl.int64) * partial_rows * C.DV
    lse_ptr = partials.lse + kv.to(tl.int64) * partial_rows
    segment_last = tl.load(work.program + pid * 2 + 1)
    for w in range(tl.load(work.program + pid * 2), segment_last):
        first = tl.load(work.segment + w * 6)
        rows = tl.load(work.segment + w * 6 + 1)
        source = tl.load(work.segment + w * 6 + 2)
        low = tl.load(work.segment + w * 6 + 3)
        high = tl.load(work.segment + w * 6 + 4)
        base = tl.load(work.segment + w * 6 + 5)
        is_slot = source >= G
        slot = source - G
        prompt_len = tl.load(layout.prompt_len + source, mask=source < G, other=0)
        slot_len = tl.load(layout.slot_len + slot, mask=is_slot, other=0)
        length = tl.where(is_slot, slot_len, prompt_len)
        node_first = tl.load(layout.slot_start + slot, mask=is_slot, other=0)
        nodes = tl.load(layout.slot_nodes + slot, mask=is_slot, other=0)
        # the unit after the last page is the slot's nodes
        nodes = tl.where(high > tl.cdiv(length, C.PAGE), nodes, 0)
        if is_slot:
            table_ptr = layout.slot_pages + slot.to(tl.int64) * slot_width
        else:
            table_ptr = layout.prompt_pages + source.to(tl.int64) * prompt_width
        results = (o_ptr, lse_ptr)
        segment = (first, rows, low, high, base)
        keys = (table_ptr, length, node_first, nodes, is_slot.to(tl.int32))
        if BLOCK_M < C.PAGE:
            for packed in range(0, rows * EACH, BLOCK_M):
                _attend_tile(
                    operands,
                    layout.ancestors,
                    work.first,
                    results,
                    strides,
                    segment,
                    keys,
                    packed,
                    kv,
                    scale,
                    cap,
                    BLOCK_M,
                    DTYPE,
                    C,
                )
        elif rows * EACH <= BLOCK_SMALL:
            _attend_tile(
                operands,
                layout.ancestors,
                work.first,
                results,
                strides,
                segment,
                keys,
                0,
                kv,
                scale,
                cap,
                BLOCK_SMALL,
                DTYPE,
                C,
            )
        else:
            _attend_tile(
                operands,
                layout.ancestors,
                work.first,
                results,
                strides,
                segment,
                keys,
                0,
                kv,
                scale,
                cap,
                BLOCK_M,
                DTYPE,
                C,
            )
