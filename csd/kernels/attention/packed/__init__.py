"""Causal attention of samples whose common prefixes are stored once, and its gradients.

    score(i, j) = cap(scale * q[i, h] . k[j, h // (H / K)]),   cap(x) = softcap * tanh(x / softcap)
    lse[i, h]   = log(sum over j of exp(score(i, j)) + exp(sink[h]))
    w(i, j)     = exp(score(i, j) - lse[i, h])
    out[i, h]   = sum over j of w(i, j) v[j, h // (H / K)]

over the rows j with j <= i < end[j] (`layout.py`), position[i] - position[j] < window, and an equal
position // chunk. With g the gradient of out, delta[i, h] = g[i, h] . out[i, h] and cap' the cap's
derivative at the score, the gradients are

    dv[j] = sum over i, h of w(i, j) g[i, h]
    ds(i, j) = w(i, j) (g[i, h] . v[j] - delta[i, h]) cap'(i, j) scale
    dq[i, h] = sum over j of ds(i, j) k[j],   dk[j] = sum over i, h of ds(i, j) q[i, h]
    dsink[h] = - sum over i of exp(sink[h] - lse[i, h]) delta[i, h]

(Dao et al., "FlashAttention", 2022, whose backward also recomputes w from lse.) A key's gradient is
summed over all rows below it in one fixed order, without atomics: two runs have equal bits.

`packed_attention_backward` takes the result of any forward that computes this attention, also one
with an order of sums of its own.
"""

from collections.abc import Callable
from typing import Any

import torch

from csd.kernels.attention import check_properties
from csd.kernels.attention.packed.layout import PACKED, PackedLayout, PackedRows, pack_rows
from csd.kernels.attention.packed.reference import (
    packed_attention_backward_ref,
    packed_attention_ref,
    wide_dtype,
)
from csd.kernels.common.operator import launcher, operator
from csd.state.record import check_tensor

__all__ = [
    "PackedLayout",
    "PackedRows",
    "pack_rows",
    "packed_attention",
    "packed_attention_backward",
    "packed_attention_backward_ref",
    "packed_attention_ref",
    "packed_lse",
]


@launcher
def packed_attention_triton() -> Callable:
    from csd.kernels.attention.packed.triton.forward import packed_attention_triton

    return packed_attention_triton


@launcher
def packed_attention_backward_triton() -> Callable:
    from csd.kernels.attention.packed.triton.backward import packed_attention_backward_triton

    return packed_attention_backward_triton


def _blocks(name: str) -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.attention.packed import blocks

    return (lambda *args: True), getattr(blocks, name)


def _empty_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple:
    lse = q.new_empty(q.shape[:2], dtype=wide_dtype(q))
    return q.new_empty(*q.shape[:2], v.shape[2]), lse


def _empty_gradients(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple:
    sinks = rest[-1]
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


_packed_attention = operator(
    "packed_attention",
    packed_attention_ref,
    packed_attention_triton,
    loop=lambda: _blocks("packed_attention_blocks"),
    compiled=False,
    fake=_empty_results,
)
_packed_attention_backward = operator(
    "packed_attention_backward",
    packed_attention_backward_ref,
    packed_attention_backward_triton,
    loop=lambda: _blocks("packed_backward_blocks"),
    compiled=False,
    fake=_empty_gradients,
)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, end, position, *ctx.numbers, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, end, position, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple:
    *saved, sinks = ctx.saved_tensors
    *grads, dsinks = _packed_attention_backward(grad, *saved, *ctx.numbers, sinks)
    return *grads, *[None] * 6, None if sinks is None else dsinks


_packed_attention.register_autograd(_backward, setup_context=_save)


def packed_attention(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    v: torch.Tensor,  # [R, K, Dv]
    layout: PackedLayout,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [R, H, Dv] and lse [R, H], a natural logarithm in at least float32.

    out is differentiable in q, k, v and sinks; lse is not. window, chunk, softcap, sinks: as in
    `tree_attention`. Raises ValueError for operands that do not fit each other.
    """
    _check(q, k, v, layout)
    check_properties(q, window, chunk, softcap, sinks)
    result: tuple[torch.Tensor, torch.Tensor] = _packed_attention(
        q, k, v, *layout, scale, window, chunk, softcap, sinks
    )
    return result


def packed_lse(
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    layout: PackedLayout,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns the lse [R, H] of `packed_attention`, which depends on no value."""
    with torch.no_grad():
        return packed_attention(
            q,
            k,
            k[..., :0],
            layout,
            scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
            sinks=sinks,
        )[1]


def packed_attention_backward(
    grad: torch.Tensor,  # [R, H, Dv]
    q: torch.Tensor,  # [R, H, D]
    k: torch.Tensor,  # [R, K, D]
    v: torch.Tensor,  # [R, K, Dv]
    out: torch.Tensor,  # [R, H, Dv]
    lse: torch.Tensor | None,  # [R, H]
    layout: PackedLayout,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns dq [R, H, D], dk [R, K, D], dv [R, K, Dv] and dsinks [H], or None without sinks.

    grad: gradient of out. out: of any forward that computes this attention. lse: of
    `packed_attention`, or None to compute it again. Not differentiable.
    """
    _check(q, k, v, layout)
    check_properties(q, window, chunk, softcap, sinks)
    shape = *q.shape[:2], v.shape[2]
    for name, x in (("grad", grad), ("out", out)):
        check_tensor(name, x, shape, q.dtype, q.device, any_layout=True)
    if lse is not None:
        check_tensor("lse", lse, q.shape[:2], wide_dtype(q), q.device, any_layout=True)
    dq, dk, dv, dsinks = _packed_attention_backward(
        grad, q, k, v, out, lse, *layout, scale, window, chunk, softcap, sinks
    )
    return dq, dk, dv, None if sinks is None else dsinks


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout) -> None:
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q, k and v must be [R, H, D], [R, K, D] and [R, K, Dv] with H a multiple of K, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    (R, _, D), K = q.shape, k.shape[1]
    check_tensor("q", q, q.shape, None, q.device, any_layout=True)
    for name, x, size in (("k", k, D), ("v", v, v.shape[2])):
        check_tensor(name, x, (R, K, size), q.dtype, q.device, any_layout=True)
    PACKED.check(layout, {"R": R}, q.device, prefix="layout.")
