"""RMS norm, rotary embedding and SwiGLU, one call each; the formulas are in `csd/kernels`.

They do not support float64: there a norm's statistics, which are float32 in any dtype, cause the
largest difference from transformers, and the reference sums them as transformers does.
"""

from typing import Any

import numpy as np
import torch

from csd.kernels.layers.constants import CUBIC, LINEAR
from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import (
    BLOCK,
    add_to_lane,
    added_pair,
    block,
    filled,
    plus,
    times,
)
from csd.kernels.numba.math import exp
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require, rounded
from csd.kernels.numba.threads import by_threads, share

LOW = (torch.bfloat16, torch.float32)
# coefficients of GELU's tanh approximation
_LINEAR, _CUBIC = np.float32(LINEAR), np.float32(CUBIC)
# cost of an exponential, in other numbers that a loop computes
EXP = 4


@loop
def _squares(x):
    left = right = filled(np.float32(0))
    whole = x.shape[0] // (2 * BLOCK) * (2 * BLOCK)
    for j in range(0, whole, 2 * BLOCK):
        low, high = block(x, j), block(x, j + BLOCK)
        left, right = plus(left, times(low, low)), plus(right, times(high, high))
    for j in range(whole, x.shape[0]):
        left = add_to_lane(left, (j - whole) % BLOCK, x[j] * x[j])
    return added_pair(left, right)


@by_threads
def norm_rows(
    part,
    parts,
    R,
    F,
    x,  # [R, F]
    residual,  # [R, F], or 0 for none
    weight,  # [F]
    eps,
    y,  # [R, F], written
    total,  # [R, F], written where there is a residual
    like,
    plus_one,
):
    """Write norms of R rows; x, residual, weight, y and total are addresses."""
    first, last = share(R, part, parts)
    for m in range(first, last):
        row = m * F * like.itemsize
        x_m, y_m = memory(x + row, F, like), memory(y + row, F, like)
        scale, wide = memory(weight, F, like), np.empty(F, np.float32)
        if residual:
            r_m, total_m = memory(residual + row, F, like), memory(total + row, F, like)
            # `total` may be `residual`, and a loop that writes what it reads is not vectorized
            for j in range(F):
                wide[j] = read(rounded(read(x_m[j]) + read(r_m[j]), like))
            for j in range(F):
                total_m[j] = rounded(wide[j], like)
        else:
            for j in range(F):
                wide[j] = read(x_m[j])
        length = np.float32(1) / np.sqrt(_squares(wide) / np.float32(F) + eps)
        if plus_one:
            for j in range(F):
                y_m[j] = rounded((np.float32(1) + read(scale[j])) * (wide[j] * length), like)
        else:
            for j in range(F):
                y_m[j] = rounded(read(scale[j]) * read(rounded(wide[j] * length, like)), like)


def reads_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *others: Any) -> bool:
    """True if the loop reads `rms_norm`'s tensors; others: the residual, and non-tensors."""
    residual = next((y for y in others if isinstance(y, torch.Tensor)), None)
    return x.dtype in LOW and readable(x, weight, residual)


def rms_norm(
    x: torch.Tensor,  # [.., F]
    weight: torch.Tensor,  # [F]
    eps: float,
    residual: torch.Tensor | None = None,  # [.., F]
    rows: torch.Tensor | None = None,  # [M] int32, rows of x [V, F]; without a residual
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm y and its input r, x + residual, both [.., F], as `rms_norm_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    require(reads_norm(x, weight, eps, residual), "rms_norm", x, weight, residual)
    if rows is not None:
        x = torch.nn.functional.embedding(rows.clamp(min=0), x)
    x, weight, F = x.contiguous(), weight.contiguous(), x.shape[-1]
    y, total, other = torch.empty_like(x), x, 0
    if residual is not None:
        total, residual = torch.empty_like(x), residual.contiguous()
        other = residual.data_ptr()
    norm_rows(
        x.numel(),
        x.numel() // F,
        F,
        x.data_ptr(),
        other,
        weight.data_ptr(),
        np.float32(eps),
        y.data_ptr(),
        total.data_ptr(),
        LIKE[x.dtype],
        plus_one,
    )
    return y, total


@by_threads
def rotate_rows(
    part,
    parts,
    shape,  # M, H, K, D, R
    q,  # [M, H, D]
    k,  # [M, K, D]
    v,  # [M, K, D]
    strides,  # numbers between rows of q, of k and of v
    position,  # [M] int32
    cos,  # [positions, R]
    sin,  # [positions, R]
    out,  # [M, H, D], written
    node_k,  # [M, K, D], written
    node_v,  # [M, K, D], written: v
    like,
):
    """Rotate queries and keys and copy values; tensors but `position` are addresses."""
    M, H, K, D, R = shape
    size = like.itemsize
    first, last = share(M, part, parts)
    for m in range(first, last):
        offset = position[m] * R * size
        c, s = memory(cos + offset, R, like), memory(sin + offset, R, like)
        for h in range(H):
            source = q + (m * strides[0] + h * D) * size
            _rotate(D, source, c, s, out + (m * H + h) * D * size, like)
        for h in range(K):
            offset, to = h * D * size, (m * K + h) * D * size
            _rotate(D, k + m * strides[1] * size + offset, c, s, node_k + to, like)
            values = memory(v + m * strides[2] * size + offset, D, like)
            written = memory(node_v + to, D, like)
            for j in range(D):
                written[j] = values[j]


@loop
def _rotate(D, x, cos, sin, y, like):
    """Write a head x [D] to y with its first R numbers rotated; x and y are addresses."""
    R, half = cos.shape[0], cos.shape[0] // 2
    source, left = memory(x, D, like), memory(y, D, like)
    for j in range(R, D):
        left[j] = source[j]
    second_half = half * like.itemsize
    low, high = memory(x, half, like), memory(x + second_half, half, like)
    y_low, y_high = memory(y, half, like), memory(y + second_half, half, like)
    cos_h, sin_h = cos[half:R], sin[half:R]
    for j in range(half):
        rotated = read(rounded(read(low[j]) * read(cos[j]), like))
        y_low[j] = rounded(rotated - read(high[j]) * read(sin[j]), like)
    for j in range(half):
        rotated = read(rounded(read(high[j]) * read(cos_h[j]), like))
        y_high[j] = rounded(rotated + read(low[j]) * read(sin_h[j]), like)


def reads_rotary(*tensors: torch.Tensor) -> bool:
    """True if the loop reads `rotary`'s tensors; a row's heads must be adjacent in memory."""
    heads, position, dense = tensors[:3], tensors[3], tensors[4:]
    rows = all(x.stride()[1:] == (x.shape[2], 1) or not x.numel() for x in heads)
    whole = rows and all(x.is_contiguous() for x in (position, *dense))
    return heads[0].dtype in LOW and whole and readable(*heads, *dense)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [M, H, D]; writes rotated keys to node_k and values to node_v.

    See `rotary_ref`. Raises TypeError for tensors that loops do not read.
    """
    tensors = q, k, v, position, cos, sin, node_k, node_v
    require(reads_rotary(*tensors), "rotary", *tensors)
    out = torch.empty(q.shape, dtype=q.dtype)
    shape = *q.shape[:2], *k.shape[1:], cos.shape[1]
    rotate_rows(
        q.numel(),
        shape,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        (q.stride(0), k.stride(0), v.stride(0)),
        position.numpy(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        node_k.data_ptr(),
        node_v.data_ptr(),
        LIKE[q.dtype],
    )
    return out


@by_threads
def gate_rows(part, parts, R, F, gate_up, y, like, gelu):
    """y [R, F] = SiLU(gate) up, or GELU(gate) up with `gelu`, of gate_up [R, 2 F]; addresses."""
    size = F * like.itemsize
    first, last = share(R, part, parts)
    for m in range(first, last):
        source = gate_up + 2 * m * size
        gates, ups = memory(source, F, like), memory(source + size, F, like)
        y_m = memory(y + m * size, F, like)
        for j in range(F):
            gate = read(gates[j])
            z = gate * (_LINEAR + _CUBIC * gate * gate) if gelu else gate
            active = read(rounded(gate / (exp(-z) + np.float32(1)), like))
            y_m[j] = rounded(active * read(ups[j]), like)


def reads_swiglu(gate_up: torch.Tensor, gelu: bool = False) -> bool:
    """True if the loop reads `swiglu`'s tensor."""
    return gate_up.dtype in LOW and readable(gate_up)


def swiglu(gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """SwiGLU of gate_up [.., 2F], as `swiglu_ref`; returns [.., F]. gelu: GELU in place of SiLU.

    Raises TypeError for a tensor that loops do not read.
    """
    require(reads_swiglu(gate_up), "swiglu", gate_up)
    F, gate_up = gate_up.shape[-1] // 2, gate_up.contiguous()
    y = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype)
    gate_rows(
        EXP * y.numel(),
        y.numel() // F,
        F,
        gate_up.data_ptr(),
        y.data_ptr(),
        LIKE[y.dtype],
        gelu,
    )
    return y
