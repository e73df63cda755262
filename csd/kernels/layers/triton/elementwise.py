"""Kernels of `rms_norm`, `rotary` and `swiglu`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from csd.kernels.common.triton import launch_next


@triton.jit(do_not_specialize=["R", "B"])
def rms_norm_kernel(
    x_ptr,  # [R / B, B, F], or [PARTS, R, F] float32
    residual_ptr,  # [R, F], or None
    rows_ptr,  # [R] int32, or None
    weight_ptr,  # [F]
    results,  # y [R, F], and the sum [R, F] or None without a residual and rows
    R,
    B,
    strides,  # of x
    eps,
    F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    y_ptr, sum_ptr = results
    x_stride, x_stride_b = strides
    if PDL:
        # the product that follows may prefetch its weights
        launch_next()
    # [BLOCK_R, 1]
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    at_x = (row // B).to(tl.int64) * x_stride + (row % B).to(tl.int64) * x_stride_b
    if rows_ptr is not None:
        of = tl.load(rows_ptr + row, mask=row < R, other=0)
        at_x = tl.maximum(of, 0).to(tl.int64) * x_stride
    offset = row.to(tl.int64) * F
    # [1, BLOCK_F]
    offs = tl.arange(0, BLOCK_F)[None, :]
    # [BLOCK_R, BLOCK_F]
    mask = (row < R) & (offs < F)
    x = tl.load(x_ptr + at_x + offs, mask=mask, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * R.to(tl.int64) * F + offset + offs, mask=mask, other=0.0)
        x = x.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offset + offs, mask=mask, other=0.0)
        x = (x.to(WIDE) + residual.to(WIDE)).to(x.dtype)
    if sum_ptr is not None:
        tl.store(sum_ptr + offset + offs, x, mask=mask)
    wide = x.to(tl.float32)
    # [BLOCK_R, 1]
    scale = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / F + eps)
    weight = tl.load(weight_ptr + offs, mask=offs < F, other=0.0)
    if PLUS_ONE:
        y = wide * scale * (1.0 + weight.to(tl.float32))
    else:
        y = weight.to(WIDE) * (wide * scale).to(x.dtype).to(WIDE)
    tl.store(y_ptr + offset + offs, y.to(x.dtype), mask=mask)


@triton.jit
def _added(x_ptr, offsets, mask, parts, at_bias, kind: tl.constexpr, PARTS: tl.constexpr):
    """Loads the values at `offsets`; if PARTS > 1, returns the sum of the parts with the bias."""
    part_stride, bias_ptr = parts
    x = tl.load(x_ptr + offsets, mask=mask)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * part_stride + offsets, mask=mask)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + at_bias, mask=mask).to(tl.float32)
        x = x.to(kind)
    return x


@triton.jit
def _rotate(
    x_ptr, y_ptr, at_x, at_y, mask, angles, parts, at_bias, R: tl.constexpr, PARTS: tl.constexpr
):
    cos_l, cos_h, sin_l, sin_h = angles
    # both halves of the heads' rotated part in one tile each: [heads, BLOCK_D]
    kind: tl.constexpr = y_ptr.dtype.element_ty
    half: tl.constexpr = R // 2
    low = _added(x_ptr, at_x, mask, parts, at_bias, kind, PARTS)
    high = _added(x_ptr, at_x + half, mask, parts, at_bias + half, kind, PARTS)
    low, high = low.to(cos_l.dtype), high.to(cos_l.dtype)
    tl.store(y_ptr + at_y, (low * cos_l - high * sin_l).to(kind), mask=mask)
    tl.store(y_ptr + at_y + half, (high * cos_h + low * sin_h).to(kind), mask=mask)


@triton.jit
def _keep(x_ptr, y_ptr, at_x, at_y, mask, parts, at_bias, PARTS: tl.constexpr):
    x = _added(x_ptr, at_x, mask, parts, at_bias, y_ptr.dtype.element_ty, PARTS)
    tl.store(y_ptr + at_y, x, mask=mask)


class HeadRows(NamedTuple):
    """Queries, keys and values of rows; with all of them queries may be [PARTS, M, ..] float32."""

    q: Any  # [M, H, D]
    k: Any  # [M, K, D]
    v: Any  # [M, K, D], or None


class Strides(NamedTuple):
    """Elements from a row to the next, and from a part to the next."""

    q: int
    k: int
    v: int
    part: int


@triton.jit
def rotary_kernel(
    heads,
    bias_ptr,  # [(H + 2 K) D], or None
    position_ptr,  # [M] int32, or None: position is the row
    cos_ptr,  # [positions, R]
    sin_ptr,  # [positions, R]
    out,  # `HeadRows`, written
    strides,
    EACH: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    # [1, BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    half = offs_d < R // 2
    offsets = row * R + offs_d
    if position_ptr is not None:
        offsets = tl.load(position_ptr + row).to(tl.int64) * R + offs_d
    cos_l = tl.load(cos_ptr + offsets, mask=half).to(WIDE)
    cos_h = tl.load(cos_ptr + offsets + R // 2, mask=half).to(WIDE)
    sin_l = tl.load(sin_ptr + offsets, mask=half).to(WIDE)
    sin_h = tl.load(sin_ptr + offsets + R // 2, mask=half).to(WIDE)
    angles, parts = (cos_l, cos_h, sin_l, sin_h), (strides.part, bias_ptr)

    # [BLOCK_E, BLOCK_D]
    e = tl.arange(0, BLOCK_E)[:, None]
    in_heads = (kv * EACH + e) * D + offs_d
    mask = (e < EACH) & half
    at_out = row * (EACH * K * D) + in_heads
    at_q = row * strides.q + in_heads
    _rotate(heads.q, out.q, at_q, at_out, mask, angles, parts, in_heads, R, PARTS)
    at_node = row * (K * D) + kv * D + offs_d
    at_k = row * strides.k + kv * D + offs_d
    # columns of the product: queries, keys, values
    in_keys = (EACH * K + kv) * D + offs_d
    _rotate(heads.k, out.k, at_k, at_node, half, angles, parts, in_keys, R, PARTS)
    for i in tl.static_range((D - R + BLOCK_D - 1) // BLOCK_D):
        on = R + i * BLOCK_D
        there = on + offs_d < D
        mask = (e < EACH) & there
        _keep(heads.q, out.q, at_q + on, at_out + on, mask, parts, in_heads + on, PARTS)
        _keep(heads.k, out.k, at_k + on, at_node + on, there, parts, in_keys + on, PARTS)
    if heads.v is not None:
        half = offs_d < D // 2
        at_v = row * strides.v + kv * D + offs_d
        in_values = in_keys + K * D
        for i in tl.static_range(2):
            on = i * (D // 2)
            _keep(heads.v, out.v, at_v + on, at_node + on, half, parts, in_values + on, PARTS)


@triton.jit
def silu_times(gate, up):
    # exp overflows to infinity for very negative gates, and the quotient is 0 as it should be
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gelu_times(gate, up, A: tl.constexpr, B: tl.constexpr):
    return gate / (1.0 + tl.exp(-gate * (A + B * gate * gate))) * up


@triton.jit
def swiglu_kernel(
    gate_ptr,  # [R, ROW]
    up_ptr,  # [R, ROW], or None: up is WIDTH elements after gate
    y_ptr,  # [R, WIDTH]
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    GELU: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    offsets = row * ROW + offs
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(WIDE)
    if up_ptr is None:
        up = tl.load(gate_ptr + offsets + WIDTH, mask=mask, other=0.0).to(WIDE)
    else:
        up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(WIDE)
    y = gelu_times(gate, up, A, B) if GELU else silu_times(gate, up)
    tl.store(y_ptr + row * WIDTH + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
