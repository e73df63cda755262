"""Rotary position embedding of queries and keys, each row with its own cosines and sines.

    rot(x)_j = x_j cos_j - x_{j + D/2} sin_j           j < D/2
               x_j cos_j + x_{j - D/2} sin_j           j >= D/2

The kernel is that of `csd/kernels/rotary.py`, without the store of keys and values. The gradient is
also a rotation, with the sines negated and their halves exchanged.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from csd.kernels.checks import check_tensor
from csd.kernels.rotary import _rotary_kernel, _rotate_half
from csd.kernels.torch_operators import operator


def rotate_ref(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    cos: torch.Tensor,  # [M, D]
    sin: torch.Tensor,  # [M, D]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotated q [M, H, D] and k [M, K, D]."""
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def rotate_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. Each row of q and k is contiguous; rows may be apart."""
    (M, H, D), K = q.shape, k.shape[1]
    out_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _rotary_kernel[(M, K)](
        q_ptr=q,
        k_ptr=k,
        v_ptr=None,
        bias_ptr=None,
        position_ptr=None,
        cos_ptr=cos,
        sin_ptr=sin,
        out_ptr=out_q,
        node_k_ptr=out_k,
        node_v_ptr=None,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=0,
        part_stride=0,
        EACH=H // K,
        K=K,
        D=D,
        R=D,
        BLOCK_E=triton.next_power_of_2(H // K),
        BLOCK_D=triton.next_power_of_2(D // 2),
        WIDE=tl.float64 if q.dtype == torch.float64 else tl.float32,
        PARTS=1,
        num_warps=2,
    )
    return out_q, out_k


_rotate = operator(
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
    return *_rotate(grad_q.contiguous(), grad_k.contiguous(), cos, back), None, None


_rotate.register_autograd(_backward, setup_context=_save)


def rotate(
    q: torch.Tensor,  # [M, H, D]
    k: torch.Tensor,  # [M, K, D]
    cos: torch.Tensor,  # [M, D]
    sin: torch.Tensor,  # [M, D]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotated q [M, H, D] and k [M, K, D]. Differentiable in q and k."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] % 2 or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q and k must be [M, H, D] and [M, K, D] with an even D and H a multiple of K, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    M, _, D = q.shape
    check_tensor("q", q, q.shape, None, q.device, rows_apart=True)
    check_tensor("k", k, (M, None, D), q.dtype, q.device, rows_apart=True)
    for name, x in (("cos", cos), ("sin", sin)):
        check_tensor(name, x, (M, D), q.dtype, q.device)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise RuntimeError("rotate has no gradient for cos and sin: detach them")
    return _rotate(q, k, cos, sin)
