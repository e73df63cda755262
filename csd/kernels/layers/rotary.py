"""Rotary position embedding of queries and keys: `rotary` by tables, `rotate` by each row's angles.

    rot(x)_j = x_j cos_j - x_{j + R/2} sin_j       j < R/2
               x_j cos_j + x_{j - R/2} sin_j       R/2 <= j < R
               x_j                                 j >= R

R is D, or less if only a part of each head is rotated. (Su et al., "RoFormer", 2021, in the
half-split form that Llama checkpoints use.)

`rotary` takes cos and sin of position p, cos_j = cos_{j + R/2} = cos(p w_j) and likewise sin, from
tables [positions, R] computed in float32 and held in the model's dtype. It also stores keys and
values. Inside a decoder q, k and v may be the partial sums [P, M, ..] float32 of a product whose K
is split, by `csd.kernels.row_linear`: they are first added in order, with the product's bias, and
rounded.

`rotate` takes each row's own cosines and sines [M, D], with R = D, and stores nothing else. Its
gradient is also a rotation, with the sines negated and their halves exchanged. Both are launches of
one kernel.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from csd.kernels.common.operator import operator
from csd.state.record import check_tensor


def rotary_ref(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    v: torch.Tensor,  # [M, K, D]
    position: torch.Tensor,  # [M] int32
    cos: torch.Tensor,  # [positions, R]
    sin: torch.Tensor,  # [positions, R]
    node_k: torch.Tensor,  # [M, K, D], written
    node_v: torch.Tensor,  # [M, K, D], written
    bias: torch.Tensor | None = None,  # [(H + 2 K) D], only for partial sums
) -> torch.Tensor:
    """Returns the rotated queries [M, H, D]; rotated keys and values go to node_k and node_v."""
    if q.dim() == 4:
        q, k, v = _added_up((q, k, v), bias, node_k.dtype)
    cos, sin = (x.index_select(0, position)[:, None] for x in (cos, sin))
    R, half = cos.shape[-1], cos.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        part = x[..., :R]
        part = torch.mul(part, cos).addcmul_(part.roll(half, -1), sin)
        return part if x.shape[-1] == R else torch.cat((part, x[..., R:]), -1)

    node_k.copy_(rotated(k))
    node_v.copy_(v)
    return rotated(q)


def _added_up(
    parts: tuple[torch.Tensor, ...], bias: torch.Tensor | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    summed, start = [], 0
    for part in parts:
        x = reduce(torch.add, part)
        if bias is not None:
            width = x[0].numel()
            x = x + bias[start : start + width].view(x.shape[1:]).to(x.dtype)
            start += width
        summed.append(x.to(dtype))
    return summed


def rotary_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One launch. Rows of q, k and v are contiguous but may be apart, as in a fused product."""
    out = torch.empty(q.shape[-3:], dtype=node_k.dtype, device=q.device)
    _launch(q, k, v, position, cos, sin, (out, node_k, node_v), bias)
    return out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    position: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    bias: torch.Tensor | None = None,
) -> None:
    """Write the results of q, k and v; without `position` the rows of cos and sin are those of q.

    A tensor that is None is not read, or not written.
    """
    import triton
    import triton.language as tl

    from csd.kernels.layers.triton.elementwise import HeadRows, Strides, rotary_kernel

    (M, H, D), K = q.shape[-3:], k.shape[-2]
    parts, part_stride = (q.shape[0], q.stride(0)) if q.dim() == 4 else (1, 0)
    rotary_kernel[(M, K)](
        heads=HeadRows(q, k, v),
        bias_ptr=bias if parts > 1 else None,
        position_ptr=position,
        cos_ptr=cos,
        sin_ptr=sin,
        out=HeadRows(*results),
        strides=Strides(q.stride(-3), k.stride(-3), 0 if v is None else v.stride(-3), part_stride),
        EACH=H // K,
        K=K,
        D=D,
        R=cos.shape[1],
        BLOCK_E=triton.next_power_of_2(H // K),
        BLOCK_D=triton.next_power_of_2(D // 2),
        WIDE=tl.float64 if q.dtype == torch.float64 else tl.float32,
        PARTS=parts,
        num_warps=2,
    )


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.layers.cpu import elementwise

    return elementwise.reads_rotary, elementwise.rotary


_rotary = operator(
    "rotary",
    rotary_ref,
    rotary_triton,
    loop=_loop,
    written=("node_k", "node_v"),
    fake=lambda q, *rest: q.new_empty(q.shape),
)


def rotary(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    v: torch.Tensor,  # [M, K, D]
    position: torch.Tensor,  # [M] int32
    cos: torch.Tensor,  # [positions, R]
    sin: torch.Tensor,  # [positions, R]
    node_k: torch.Tensor,  # [M, K, D], written
    node_v: torch.Tensor,  # [M, K, D], written
) -> torch.Tensor:
    """Returns the rotated queries [M, H, D]; rotated keys and values go to node_k and node_v.

    Not differentiable; `csd.kernels.rotate` is.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError("rotary has no backward: call it under torch.no_grad(), or use rotate")
    M, D = _check_heads(q, k)
    check_tensor("v", v, k.shape, q.dtype, q.device, rows_apart=True)
    for name, x in (("node_k", node_k), ("node_v", node_v)):
        check_tensor(name, x, k.shape, q.dtype, q.device)
    check_tensor("cos", cos, (None, None), q.dtype, q.device)
    if cos.shape[1] % 2 or cos.shape[1] > D:
        raise ValueError(f"cos must be [positions, R] with an even R <= {D}, got {[*cos.shape]}")
    check_tensor("sin", sin, cos.shape, q.dtype, q.device)
    check_tensor("position", position, (M,), torch.int32, q.device)
    return _rotary(q, k, v, position, cos, sin, node_k, node_v)


def _check_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    """Numbers of rows and of a head's elements; ValueError for queries and keys that do not fit."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] % 2 or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q and k must be [M, H, D] and [M, K, D] with an even D and H a multiple of K, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    M, _, D = q.shape
    check_tensor("q", q, q.shape, None, q.device, rows_apart=True)
    check_tensor("k", k, (M, None, D), q.dtype, q.device, rows_apart=True)
    return M, D


def rotate_ref(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    cos: torch.Tensor,  # [M, D]
    sin: torch.Tensor,  # [M, D]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotated q [M, H, D] and k [M, K, D]."""
    half = q.shape[-1] // 2
    cos, sin = cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), -1)[:, None]
    return q * cos + q.roll(half, -1) * sin, k * cos + k.roll(half, -1) * sin


def rotate_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. Each row of q and k is contiguous; rows may be apart."""
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _launch(q, k, None, None, cos, sin, (out_q, out_k, None))
    return out_q, out_k


_rotate_both = operator(
    "rotate",
    rotate_ref,
    rotate_triton,
    fake=lambda q, k, cos, sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[2:])


def _backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple:
    cos, sin = ctx.saved_tensors
    low, high = sin.chunk(2, dim=-1)
    back = torch.cat((-high, -low), dim=-1)
    return *_rotate_both(grad_q.contiguous(), grad_k.contiguous(), cos, back), None, None


_rotate_both.register_autograd(_backward, setup_context=_save)


def rotate(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    cos: torch.Tensor,  # [M, D]
    sin: torch.Tensor,  # [M, D]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotated q [M, H, D] and k [M, K, D]. Differentiable in q and k."""
    M, D = _check_heads(q, k)
    for name, x in (("cos", cos), ("sin", sin)):
        check_tensor(name, x, (M, D), q.dtype, q.device)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise RuntimeError("rotate has no gradient for cos and sin: detach them")
    return _rotate_both(q, k, cos, sin)
