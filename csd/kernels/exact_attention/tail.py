"""The second launch of the exact attention: a row's partial results in order, then its tail."""

import triton
import triton.language as tl

from csd.kernels.tree_attention.kernel import _add_keys


@triton.jit(do_not_specialize=["M", "partial_rows", "prompt_cuts"])
def _tail_kernel(
    q_ptr,  # [M, H, D]
    node_k_ptr,  # [M, K, D]
    node_v_ptr,  # [M, K, D]
    k_pages_ptr,  # [n_pages, PAGE, K, D]
    v_pages_ptr,  # [n_pages, PAGE, K, D]
    row_ptr,  # [M, 4] int32
    tail_ptr,  # [M, TAIL] int32
    o_ptr,  # [K, partial rows, D] float32
    lse_ptr,  # [K, partial rows] float32
    out_ptr,  # [M, H, D]
    q_stride,
    node_stride,
    M,
    partial_rows,
    prompt_cuts,
    scale,  # times log2 e
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
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
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_E], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_E], tl.float32)
    for part in tl.static_range(2):
        first = part * prompt_cuts
        for i in range(first, first + tl.load(row_ptr + row * 4 + part)):
            # the cut is in the pointer, not in a block of offsets: no reduction over cuts
            at = kv * partial_rows + (i * M + row) * EACH
            lse = tl.load(lse_ptr + at + offs_e, mask=mask_e, other=float("-inf"))
            o = tl.load(o_ptr + at * D + offs, mask=mask, other=0.0)
            top = tl.maximum(peak, lse)
            # a finite pivot keeps rows that have seen no key from computing -inf - -inf
            pivot = tl.where(top == float("-inf"), 0.0, top)
            shrink = tl.exp2(peak - pivot)
            weight = tl.exp2(lse - pivot)
            acc = acc * shrink[:, None] + o * weight[:, None]
            total = total * shrink + weight
            peak = top

    head = q_ptr + row * q_stride + kv * (EACH * D)
    q = tl.load(head + offs, mask=mask, other=0.0).to(DTYPE)
    length = tl.load(row_ptr + row * 4 + 3)
    for j in range(0, length, BLOCK_N):
        # [BLOCK_N]
        t = j + tl.arange(0, BLOCK_N)
        place = tl.load(tail_ptr + row * TAIL + t, mask=t < length, other=-1).to(tl.int64)
        # [BLOCK_N, BLOCK_D]
        is_node = (place < -1)[:, None]
        old = (place[:, None] * K + kv) * D + offs_d[None, :]
        new = (-2 - place)[:, None] * node_stride + kv * D + offs_d[None, :]
        mask_old, mask_new = (place >= 0)[:, None] & mask_d[None, :], is_node & mask_d[None, :]
        k = tl.load(k_pages_ptr + old, mask=mask_old, other=0.0)
        k = tl.where(is_node, tl.load(node_k_ptr + new, mask=mask_new, other=0.0), k).to(DTYPE)
        v = tl.load(v_pages_ptr + old, mask=mask_old, other=0.0)
        v = tl.where(is_node, tl.load(node_v_ptr + new, mask=mask_new, other=0.0), v).to(DTYPE)
        # [BLOCK_E, BLOCK_N]
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where((t < length)[None, :], score, float("-inf"))
        acc, peak, total = _add_keys(acc, peak, total, score, v, 1.0, PRECISION)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out = out_ptr + (row * K + kv) * EACH * D + offs
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
