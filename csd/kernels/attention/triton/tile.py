"""Steps of the attention in a tile of rows, which the kernels of the tree and the exact one share.

A tile's rows are pool rows packed with the query heads of one key-value head: `rows_of_heads` loads
their queries, `page_scores` a page's keys and values, `add_keys` is one step of the online
softmax, and `put_partial` writes what a segment of a work list has added up. `tile_scores` and
`add_keys` are those of the packed attention, too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.attention.layout import TreeLayout, Work
from csd.state import kv_cache


class Operands(NamedTuple):
    """Queries, and keys and values of nodes and of pages."""

    q: torch.Tensor  # [M, H, D]
    node_k: torch.Tensor  # [M, K, D]
    node_v: torch.Tensor  # [M, K, DV]
    k_pages: torch.Tensor  # [n_pages, PAGE, K, D]
    v_pages: torch.Tensor  # [n_pages, PAGE, K, DV]

    @property
    def strides(self) -> "RowStrides":
        return RowStrides(*(x.stride(0) for x in self[:3]))


class RowStrides(NamedTuple):
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
def tile_scores(q, k, scale, cap, C: tl.constexpr):
    """[R, N]: unscaled scores; with CAP scaled and capped, in base 2 if `cap` is times log2 e."""
    PRECISION: tl.constexpr = C.PRECISION
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if C.CAP:
        return cap * _tanh(score * scale)
    else:
        return score


@triton.jit
def add_keys(acc, peak, total, score, v, scale, C: tl.constexpr):
    """One step of the online softmax: acc [R, D], peak [R], total [R], score [R, N], v [N, D].

    Scores and their peak are unscaled: one fma subtracts the peak and applies `scale`.
    """
    PRECISION: tl.constexpr = C.PRECISION
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


class Segment(NamedTuple):
    """Rows that share keys, and pages of these keys; `plan.py` and `exact_plan.py` list them."""

    first: tl.tensor  # pool row
    rows: tl.tensor  # pool rows
    source: tl.tensor  # g, or G + s
    low: tl.tensor  # first page
    high: tl.tensor  # last page + 1
    base: tl.tensor  # first row of the result
    table_ptr: tl.tensor  # the source's pages


class Tile(NamedTuple):
    """Operands of a segment and a key-value head."""

    operands: Operands
    layout: TreeLayout
    work: Work  # or ExactWork
    results: tuple  # partial results of the head, and their lse
    strides: RowStrides
    segment: Segment
    kv: tl.tensor
    scale: tl.tensor  # times log2 e; with a cap, divided by it instead
    cap: tl.tensor  # times log2 e


@triton.jit
def segment_of(layout, work, w, G, prompt_width, slot_width):
    """The w-th segment of a work list."""
    at = work.segment + w * 6
    first, rows, source = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    low, high, base = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    if source >= G:
        table_ptr = layout.slot_pages + (source - G).to(tl.int64) * slot_width
    else:
        table_ptr = layout.prompt_pages + source.to(tl.int64) * prompt_width
    return Segment(first, rows, source, low, high, base, table_ptr)


@triton.jit
def tile_heads(x_ptr, at, mask, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """[N, BLOCK_D]: heads, 0 where masked. at: [N] int64, elements of x before them. mask: [N]."""
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = x_ptr + (at[:, None] + offs_d[None, :])
    if BLOCK_D == D:
        x = tl.load(ptrs, mask=mask[:, None], other=0.0)
    else:
        x = tl.load(ptrs, mask=mask[:, None] & (offs_d < D)[None, :], other=0.0)
    return x.to(DTYPE)


@triton.jit
def store_heads(x_ptr, x, at, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes x [N, BLOCK_D]; the reverse of `tile_heads`."""
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = x_ptr + (at[:, None] + offs_d[None, :])
    tl.store(ptrs, x.to(x_ptr.dtype.element_ty), mask=mask[:, None] & (offs_d < D)[None, :])


@triton.jit
def rows_of_heads(tile, packed, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr):
    """BLOCK_R packed rows from `packed` on: their places, mask, pool rows and queries."""
    EACH: tl.constexpr = C.H // C.K
    # [BLOCK_R]
    offs_r = packed + tl.arange(0, BLOCK_R)
    mask_r = offs_r < tile.segment.rows * EACH
    row = tile.segment.first + offs_r // EACH
    head = tile.kv * EACH + offs_r % EACH
    at = row.to(tl.int64) * tile.strides.q + head * C.D
    q = tile_heads(tile.operands.q, at, mask_r, C.D, C.BLOCK_D, DTYPE)
    return offs_r, mask_r, row, q


@triton.jit
def no_keys(R: tl.constexpr, BLOCK_V: tl.constexpr):
    """acc [R, BLOCK_V], peak [R] and total [R] of `add_keys` before any key."""
    peak = tl.full([R], float("-inf"), tl.float32)
    return tl.zeros([R, BLOCK_V], tl.float32), peak, tl.zeros([R], tl.float32)


@triton.jit
def page_scores(tile, q, page, i, end, mask_n, DTYPE: tl.constexpr, C: tl.constexpr):
    """Scores [R, BLOCK_N] and values of step i, which reads BLOCK_N tokens of `page`.

    Also returns the page of step i + 1, if it is before `end`: loaded a step ahead, its latency is
    not in the loop. mask_n: as in `_tokens`.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    SUBS: tl.constexpr = C.PAGE // BLOCK_N
    operands, kv = tile.operands, tile.kv
    # [BLOCK_N]
    offs_n = tl.arange(0, BLOCK_N)
    start = page.to(tl.int64) * C.PAGE + (i % SUBS) * BLOCK_N
    page = tl.load(tile.segment.table_ptr + (i + 1) // SUBS, mask=i + 1 < end, other=0)
    k = _tokens(operands.k_pages, start, kv, offs_n, mask_n, C.K, C.D, C.BLOCK_D, DTYPE)
    v = _tokens(operands.v_pages, start, kv, offs_n, mask_n, C.K, C.DV, C.BLOCK_V, DTYPE)
    return tile_scores(q, k, tile.scale, tile.cap, C), v, page


@triton.jit
def put_partial(tile, offs_r, mask_r, acc, peak, total, unit, C: tl.constexpr):
    """Writes the partial result of packed rows. unit: a score times it is in base 2."""
    o_ptr, lse_ptr = tile.results
    # a row without a key (only sub-blocks of other branches, or all before its window) has weight 0
    # in the merge
    total = tl.where(total > 0.0, total, 1.0)
    index = tile.segment.base + offs_r
    o = acc * (1.0 / total)[:, None]
    store_heads(o_ptr, o, index.to(tl.int64) * C.DV, mask_r, C.DV, C.BLOCK_V)
    tl.store(lse_ptr + index, peak * unit + tl.log2(total), mask=mask_r)
