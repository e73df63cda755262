"""RMS norm of the sum of a layer's output and the residual stream.

    r = x + residual,    y = weight * ( r / sqrt(mean(r^2) + eps) )

Gemma's weights are stored as their distance from 1 (`plus_one`): the factor is then 1 + weight.

x may be the partial sums [P, .., F] float32 of a product whose K is split, by
`csd.kernels.row_linear`: they are first added in order and rounded.

Before the first layer r is x[max(rows, 0)]: a padding row reads row 0.

The statistics and the division are in float32 for any dtype. Then y is cast back before the weight
is applied, with `plus_one` after it: these are the orders of casts in transformers, on which its
logits depend. (Zhang and Sennrich, "Root mean square layer normalization", 2019.)
"""

from collections.abc import Callable
from functools import reduce, wraps

import torch
from torch.nn.functional import embedding

from csd.kernels.common.gpu import has_dependent_launch
from csd.kernels.common.operator import operator
from csd.state.record import check_tensor


def rms_norm_ref(
    x: torch.Tensor,  # [.., F]
    weight: torch.Tensor,  # [F]
    eps: float,
    residual: torch.Tensor | None = None,  # [.., F]
    rows: torch.Tensor | None = None,  # [M] int32: rows of x [V, F], without a residual
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, r), both [.., F] in x's dtype; r is x itself without a residual and rows."""
    if rows is not None:
        x = embedding(rows.clamp(min=0), x)
    if _in_parts(x, residual):
        assert residual is not None
        x = reduce(torch.add, x).to(residual.dtype)
    # contiguous like the kernel's result: a sum has the layout of its operands
    r = x if residual is None else (x + residual).contiguous()
    wide = r.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (wide * scale * (1.0 + weight.float())).to(x.dtype).contiguous(), r
    return (weight * (wide * scale).to(x.dtype)).contiguous(), r


def _in_parts(x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    return residual is not None and x.dim() == residual.dim() + 1


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. x may be [M, H, F] with any strides of rows and heads, as in a wider row."""

    import triton
    import triton.language as tl

    from csd.kernels.layers.triton.elementwise import rms_norm_kernel

    F, parts = x.shape[-1], 1
    if _in_parts(x, residual):
        assert residual is not None
        parts, source, x = x.shape[0], x.contiguous(), residual
        source = source.view(-1, 1, F)[: residual.numel() // F]
    else:
        source = x if x.dim() == 3 else x.reshape(-1, 1, F)
    if source.stride(-1) != 1:
        source = source.contiguous()
    shape = x.shape if rows is None else (rows.shape[0], F)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    r = None if residual is None and rows is None else torch.empty_like(y)
    tiles = _tiles(F)
    R = source.shape[0] * source.shape[1] if rows is None else rows.shape[0]
    rms_norm_kernel[(triton.cdiv(R, tiles["BLOCK_R"]),)](
        x_ptr=source,
        residual_ptr=None if residual is None else residual.contiguous(),
        rows_ptr=rows,
        weight_ptr=weight,
        results=(y, r),
        R=R,
        B=source.shape[1],
        strides=(source.stride(0), source.stride(1)),
        eps=eps,
        F=F,
        BLOCK_R=tiles["BLOCK_R"],
        BLOCK_F=tiles["BLOCK_F"],
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        PARTS=parts,
        PLUS_ONE=plus_one,
        PDL=has_dependent_launch(rms_norm_kernel),
        num_warps=tiles["num_warps"],
    )
    return y, x if r is None else r


def _tiles(F: int) -> dict[str, int]:
    """Tile sizes: whole rows, several if they are short. At most 32 elements per thread."""

    import triton

    block = triton.next_power_of_2(F)
    rows = max(1, 1024 // block)
    return dict(BLOCK_R=rows, BLOCK_F=block, num_warps=max(4, min(16, block // 1024)))


def first_of(run: Callable) -> Callable:
    """Wraps `run` without a residual; returns only its first result."""

    @wraps(run)
    def call(x, weight, eps, plus_one=False):
        return run(x, weight, eps, plus_one=plus_one)[0]

    return call


def of_sum(run: Callable) -> Callable:
    """Wraps `run` with a residual."""

    @wraps(run)
    def call(x, weight, eps, residual, plus_one=False):
        return run(x, weight, eps, residual, plus_one=plus_one)

    return call


def _loop(form: Callable) -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.layers.cpu import elementwise

    return elementwise.reads_norm, form(elementwise.rms_norm)


# an operator must not return one of its arguments: without a residual r is left out
_rms_norm = operator(
    "rms_norm",
    first_of(rms_norm_ref),
    first_of(rms_norm_triton),
    loop=lambda: _loop(first_of),
    schema="(Tensor x, Tensor weight, float eps, bool plus_one=False) -> Tensor",
    fake=lambda x, *rest, **options: x.new_empty(x.shape),
)
_add_rms_norm = operator(
    "add_rms_norm",
    of_sum(rms_norm_ref),
    of_sum(rms_norm_triton),
    loop=lambda: _loop(of_sum),
    schema="(Tensor x, Tensor weight, float eps, Tensor residual, bool plus_one=False) -> "
    "(Tensor, Tensor)",
    fake=lambda x, *rest, **options: (x.new_empty(x.shape), x.new_empty(x.shape)),
)


def rms_norm_backward(
    grad: torch.Tensor,  # [.., F]
    r: torch.Tensor,  # [.., F]
    weight: torch.Tensor,  # [F]
    eps: float,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of r [.., F] and weight [F], with the forward pass's casts.

    With s = 1 / sqrt(mean(r^2) + eps), n = s r and g = weight grad: s (g - n mean(g n)) and, over
    the rows, the sum of grad n.
    """
    wide = r.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    n = wide * scale
    g = grad.float() * (1.0 + weight.float()) if plus_one else (grad * weight).float()
    grad_r = (scale * (g - n * (g * n).mean(-1, keepdim=True))).to(r.dtype)
    if plus_one:
        return grad_r, (grad.float() * n).reshape(-1, r.shape[-1]).sum(0).to(weight.dtype)
    return grad_r, (grad * n.to(r.dtype)).reshape(-1, r.shape[-1]).sum(0)


def _save(ctx, inputs, output):
    x, weight, ctx.eps, ctx.plus_one = inputs
    ctx.save_for_backward(x, weight)


def _save_sum(ctx, inputs, output):
    _, weight, ctx.eps, _, ctx.plus_one = inputs
    ctx.save_for_backward(output[1], weight)


def _backward(ctx, grad):
    return *rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.plus_one), None, None


def _add_backward(ctx, grad, grad_sum):
    grad_r, grad_weight = rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.plus_one)
    grad_r = grad_r + grad_sum
    return grad_r, grad_weight, None, grad_r, None


_rms_norm.register_autograd(_backward, setup_context=_save)
_add_rms_norm.register_autograd(_add_backward, setup_context=_save_sum)


def rms_norm(
    x: torch.Tensor,  # [.., F]
    weight: torch.Tensor,  # [F]
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,  # [.., F]
    rows: torch.Tensor | None = None,  # [M] int32: rows of x [V, F], without a residual
    *,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, r), both [.., F] in x's dtype; r is x itself without a residual and rows.

    plus_one: the factor is 1 + weight in place of weight, and y is rounded after it.

    Differentiable; the backward pass is plain PyTorch.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, got a {type(x).__name__}")
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"x must be floating point of shape [.., F], got {x.dtype} {[*x.shape]}")
    check_tensor("weight", weight, x.shape[-1:], x.dtype, x.device)
    if rows is not None:
        if residual is not None or x.dim() != 2:
            raise ValueError("rows need x [V, F] and no residual")
        check_tensor("rows", rows, (None,), torch.int32, x.device)
        x = embedding(rows.clamp(min=0), x)
    if residual is None:
        return _rms_norm(x, weight, eps, plus_one), x
    check_tensor("residual", residual, x.shape, x.dtype, x.device, any_layout=True)
    return _add_rms_norm(x, weight, eps, residual, plus_one)
