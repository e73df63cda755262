"""The second launch of the exact attention: a row's partial results in order, then its tail."""

import triton
import triton.language as tl

from csd.kernels.merge_partials import _sinks
from csd.kernels.tree_attention.online import _add_keys, _scores


@triton.jit(do_not_specialize=["M", "partial_rows", "prompt_cuts"])
def _tail_kernel(
    q_ptr,  # [M, H, D]
    node_k_ptr,  # [M, K, D]
    node_v_ptr,  # [M, K, DV]
    k_pages_ptr,  # [n_pages, PAGE, K, D]
    v_pages_ptr,  # [n_pages, PAGE, K, DV]
    row_ptr,  # [M, 6] int32
    tail_ptr,  # [M, TAIL] int32
    first_ptr,  # [M, 2] int32 of `first_keys`, or None
    sinks_ptr,  # [H], or None
    o_ptr,  # [K, partial rows, DV] float32
    lse_ptr,  # [K, partial rows] float32
    out_ptr,  # [M, H, DV]
    q_stride,
    node_stride,
    node_v_stride,
    M,
    partial_rows,
    prompt_cuts,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    EACH: tl.constexpr = H // K
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1).to(tl.int64)
    # [BLOCK_E]
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < EACH
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    # [BLOCK_E, BLOCK_D]
    offs = offs_e[:, None] * D + offs_d[None, :]
    mask = mask_e[:, None] & mask_d[None, :]
    # [BLOCK_V]
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < DV
    # [BLOCK_E, BLOCK_V]
    offs_o = offs_e[:, None] * DV + offs_v[None, :]
    mask_o = mask_e[:, None] & mask_v[None, :]
    acc = tl.zeros([BLOCK_E, BLOCK_V], tl.float32)
    peak, total = _sinks(sinks_ptr, kv * EACH + offs_e, mask_e)
    for part in tl.static_range(2):
        first = part * prompt_cuts
        begin = first + tl.load(row_ptr + row * 6 + 4 + part)
        for i in range(begin, first + tl.load(row_ptr + row * 6 + part)):
            # a loop over cuts, not a block of offsets, so that nothing is reduced over cuts
            at = kv * partial_rows + (i * M + row) * EACH
            lse = tl.load(lse_ptr + at + offs_e, mask=mask_e, other=float("-inf"))
            o = tl.load(o_ptr + at * DV + offs_o, mask=mask_o, other=0.0)
            top = tl.maximum(peak, lse)
            # a finite pivot keeps rows without a key so far from computing -inf - -inf
            pivot = tl.where(top == float("-inf"), 0.0, top)
            shrink = tl.exp2(peak - pivot)
            weight = tl.exp2(lse - pivot)
            acc = acc * shrink[:, None] + o * weight[:, None]
            total = total * shrink + weight
            peak = top

    head = q_ptr + row * q_stride + kv * (EACH * D)
    q = tl.load(head + offs, mask=mask, other=0.0).to(DTYPE)
    length = tl.load(row_ptr + row * 6 + 3)
    if first_ptr is not None:
        # index of the first of the tail's keys that the row attends to
        since = tl.load(first_ptr + row * 2 + 1) - tl.load(row_ptr + row * 6 + 2)
    for j in range(0, length, BLOCK_N):
        # [BLOCK_N]
        t = j + tl.arange(0, BLOCK_N)
        place = tl.load(tail_ptr + row * TAIL + t, mask=t < length, other=-1).to(tl.int64)
        # [BLOCK_N, 1]
        is_node, is_old = (place < -1)[:, None], (place >= 0)[:, None]
        old, new = (place * K + kv)[:, None], (-2 - place)[:, None]
        # [BLOCK_N, BLOCK_D]
        mask_old, mask_new = is_old & mask_d[None, :], is_node & mask_d[None, :]
        at = new * node_stride + kv * D + offs_d[None, :]
        k = tl.load(k_pages_ptr + (old * D + offs_d[None, :]), mask=mask_old, other=0.0)
        k = tl.where(is_node, tl.load(node_k_ptr + at, mask=mask_new, other=0.0), k).to(DTYPE)
        # [BLOCK_N, BLOCK_V]
        mask_old, mask_new = is_old & mask_v[None, :], is_node & mask_v[None, :]
        at = new * node_v_stride + kv * DV + offs_v[None, :]
        v = tl.load(v_pages_ptr + (old * DV + offs_v[None, :]), mask=mask_old, other=0.0)
        v = tl.where(is_node, tl.load(node_v_ptr + at, mask=mask_new, other=0.0), v).to(DTYPE)
        # [BLOCK_E, BLOCK_N]
        score = _scores(q, k, scale, cap, CAP, PRECISION)
        if not CAP:
            score = score * scale
        seen = t < length
        if first_ptr is not None:
            seen &= t >= since
        score = tl.where(seen[None, :], score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, 1.0, PRECISION)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out = out_ptr + (row * K + kv) * EACH * DV + offs_o
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask_o)
