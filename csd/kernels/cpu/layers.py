"""RMS norm, rotary embedding and SwiGLU, one call each; the formulas are in `csd/kernels`.

Not in float64: there a norm's statistics, which are float32 in any dtype, are what differs most
from transformers', and the reference adds them up as transformers does.
"""

import numpy as np
import torch

from csd.kernels.cpu.numbers import any_order, array, exp, loop, read, rounded
from csd.kernels.rms_norm import rms_norm_ref
from csd.kernels.rotary import rotary_ref
from csd.kernels.swiglu import swiglu_ref

LOW = (torch.bfloat16, torch.float32)


@any_order
def _squares(x):
    total = np.float32(0)
    for j in range(x.shape[0]):
        total += x[j] * x[j]
    return total


@loop
def _rms_norm(
    x,  # [R, F]
    residual,  # [R, F], or [0, F] for none
    weight,  # [F]
    eps,
    y,  # [R, F], written
    total,  # [R, F], written where there is a residual
):
    R, F = x.shape
    wide = np.empty(F, np.float32)
    for m in range(R):
        if residual.shape[0]:
            for j in range(F):
                total[m, j] = rounded(read(x[m, j]) + read(residual[m, j]), total)
        row = total[m] if residual.shape[0] else x[m]
        for j in range(F):
            wide[j] = np.float32(read(row[j]))
        scale = np.float32(1) / np.sqrt(_squares(wide) / np.float32(F) + eps)
        for j in range(F):
            normed = read(rounded(wide[j] * scale, y))
            y[m, j] = rounded(read(weight[j]) * normed, y)


def rms_norm(
    x: torch.Tensor,  # [.., F]
    weight: torch.Tensor,  # [F]
    eps: float,
    residual: torch.Tensor | None = None,  # [.., F]
    rows: torch.Tensor | None = None,  # [M] int32: of x [V, F], without a residual
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_ref`."""
    if x.dtype not in LOW:
        return rms_norm_ref(x, weight, eps, residual, rows)
    if rows is not None:
        x = torch.nn.functional.embedding(rows.clamp(min=0), x)
    x, F = x.contiguous(), x.shape[-1]
    y, total = torch.empty_like(x), x
    given = array(x).reshape(-1, F)
    other = given[:0]
    if residual is not None:
        total = torch.empty_like(x)
        other = array(residual.contiguous()).reshape(-1, F)
    _rms_norm(
        given, other, array(weight), np.float32(eps), array(y).reshape(-1, F),
        array(total).reshape(-1, F),
    )  # fmt: skip
    return y, total


@loop
def _rotary(
    q,  # [M, H, D] as `_flat`: numba makes vectors only of memory that it knows to be in one piece
    k,  # [M, K, D]
    v,  # [M, K, D]
    strides,  # of a row of each
    position,  # [M] int32
    cos,  # [positions, D]
    sin,  # [positions, D]
    out,  # [M, H, D], written
    node_k,  # [M, K, D], written
    node_v,  # [M, K, D], written
):
    M, H, D = out.shape
    kind = type(read(cos[0, 0]))
    c, s = np.empty(D, kind), np.empty(D, kind)
    for m in range(M):
        for j in range(D):
            c[j], s[j] = read(cos[position[m], j]), read(sin[position[m], j])
        for h in range(H):
            at = m * strides[0] + h * D
            _rotate(q[at : at + D], c, s, out[m, h])
        for h in range(node_k.shape[1]):
            at, at_v = m * strides[1] + h * D, m * strides[2] + h * D
            _rotate(k[at : at + D], c, s, node_k[m, h])
            node_v[m, h] = v[at_v : at_v + D]


@loop
def _rotate(x, cos, sin, y):
    half = x.shape[0] // 2
    low, high, cos_h, sin_h, y_h = x[:half], x[half:], cos[half:], sin[half:], y[half:]
    for j in range(half):
        turned = read(rounded(read(low[j]) * cos[j], y))
        y[j] = rounded(turned - read(high[j]) * sin[j], y)
    for j in range(half):
        turned = read(rounded(read(high[j]) * cos_h[j], y))
        y_h[j] = rounded(turned + read(low[j]) * sin_h[j], y)


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
    """`rotary_ref`."""
    if q.dtype not in LOW:
        return rotary_ref(q, k, v, position, cos, sin, node_k, node_v)
    out = torch.empty(q.shape, dtype=q.dtype)
    _rotary(
        _flat(q), _flat(k), _flat(v), (q.stride(0), k.stride(0), v.stride(0)), position.numpy(),
        array(cos), array(sin), array(out), array(node_k), array(node_v),
    )  # fmt: skip
    return out


def _flat(x: torch.Tensor) -> np.ndarray:
    """The memory of x [M, H, D] from its first number to its last; rows may lie apart."""
    M, H, D = x.shape
    return array(x.as_strided(((M - 1) * x.stride(0) + H * D,), (1,)))


@loop
def _swiglu(gate_up, y):
    R, F = y.shape
    for m in range(R):
        gates, ups = gate_up[m, :F], gate_up[m, F:]
        for j in range(F):
            gate = read(gates[j])
            silu = read(rounded(gate / (exp(-gate) + np.float32(1)), y))
            y[m, j] = rounded(silu * read(ups[j]), y)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`swiglu_ref`."""
    if gate_up.dtype not in LOW:
        return swiglu_ref(gate_up)
    y = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
    _swiglu(
        array(gate_up.contiguous()).reshape(-1, gate_up.shape[-1]),
        array(y).reshape(-1, y.shape[-1]),
    )
    return y
