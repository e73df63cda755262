"""Kernels of `row_linear` and `gated_linear`."""

import triton
import triton.language as tl

from csd.kernels.common.triton import launch_next, prefetch, wait_for_previous
from csd.kernels.layers.triton.elementwise import silu_times


@triton.jit(do_not_specialize=["M", "blocks"])
def row_linear_kernel(
    x_ptr,  # [M, K], rows x_stride apart
    weights,  # w [N, K], and bias [N] or None
    y_ptr,  # [M, N], or [splits, M, N] float32
    M,
    N,
    K,
    x_stride,
    blocks,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    w_ptr, bias_ptr = weights
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    split = tl.program_id(2)
    # rows past the last one are read as the last one, and not written
    # [BLOCK_T, BLOCK_K]
    x_at = x_ptr + tl.minimum(offs_t, M - 1).to(tl.int64)[:, None] * x_stride + offs_k[None, :]
    # [BLOCK_N, BLOCK_K]
    w_at = w_ptr + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    first = split * blocks
    if PDL:
        launch_next()
        row = w_ptr + tl.minimum(offs_n, N - 1).to(tl.int64) * K + first * BLOCK_K
        prefetch(row, K - first * BLOCK_K, BLOCK_K, AHEAD)
        wait_for_previous()
    for i in range(first, tl.minimum(first + blocks, tl.cdiv(K, BLOCK_K))):
        k = i * BLOCK_K
        if EVEN:
            x = tl.load(x_at + k).to(DTYPE)
            w = tl.load(w_at + k).to(DTYPE)
        else:
            mask_k = (k + offs_k < K)[None, :]
            x = tl.load(x_at + k, mask=mask_k, other=0.0).to(DTYPE)
            w = tl.load(w_at + k, mask=mask_k, other=0.0).to(DTYPE)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
    y_ptr += split.to(tl.int64) * M * N
    y_at = y_ptr + offs_t.to(tl.int64)[:, None] * N + offs_n[None, :]
    mask = (offs_t < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y_at, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def add_splits_kernel(
    part_ptr,  # [PARTS, M, N] float32
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    M,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    acc = tl.load(part_ptr + row * N + offs, mask=mask, other=0.0)
    for s in tl.static_range(1, PARTS):
        acc += tl.load(part_ptr + (s * M + row) * N + offs, mask=mask, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + offs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gated_linear_kernel(
    x_ptr,  # [M, K], rows x_stride apart
    w_ptr,  # [2F, K]
    y_ptr,  # [M, F]
    M,
    F,
    K,
    x_stride,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_k = tl.arange(0, BLOCK_K)
    # rows past the last one are read as the last one, and not written
    # [BLOCK_T, BLOCK_K]
    x_at = x_ptr + tl.minimum(offs_t, M - 1).to(tl.int64)[:, None] * x_stride + offs_k[None, :]
    # [BLOCK_F, BLOCK_K]
    row = tl.minimum(offs_f, F - 1).to(tl.int64)
    gate_at = w_ptr + row[:, None] * K + offs_k[None, :]
    up_at = w_ptr + (F + row)[:, None] * K + offs_k[None, :]
    if PDL:
        launch_next()
        # [2 BLOCK_F]: rows of both halves, one per thread
        both = tl.arange(0, 2 * BLOCK_F)
        first = tl.minimum(tl.program_id(1) * BLOCK_F + both % BLOCK_F, F - 1)
        first += both // BLOCK_F * F
        prefetch(w_ptr + first.to(tl.int64) * K, K, BLOCK_K, AHEAD)
        wait_for_previous()
    gate = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for i in range(0, tl.cdiv(K, BLOCK_K)):
        k = i * BLOCK_K
        if EVEN:
            x = tl.load(x_at + k).to(DTYPE)
            w_gate = tl.load(gate_at + k).to(DTYPE)
            w_up = tl.load(up_at + k).to(DTYPE)
        else:
            mask_k = (k + offs_k < K)[None, :]
            x = tl.load(x_at + k, mask=mask_k, other=0.0).to(DTYPE)
            w_gate = tl.load(gate_at + k, mask=mask_k, other=0.0).to(DTYPE)
            w_up = tl.load(up_at + k, mask=mask_k, other=0.0).to(DTYPE)
        gate = tl.dot(w_gate, tl.trans(x), gate, input_precision=PRECISION)
        up = tl.dot(w_up, tl.trans(x), up, input_precision=PRECISION)
    # rounded as if the product were written to memory and read again
    kind = y_ptr.dtype.element_ty
    y = silu_times(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32))
    y_at = y_ptr + offs_t.to(tl.int64)[:, None] * F + offs_f[None, :]
    mask = (offs_t < M)[:, None] & (offs_f < F)[None, :]
    tl.store(y_at, tl.trans(y).to(kind), mask=mask)
