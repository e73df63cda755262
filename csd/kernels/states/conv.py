"""A short causal convolution of each channel along the paths of a pool's trees.

    y_j = f(bias + sum over o = W - 1 .. 0 of weight[:, W - 1 - o] x(j, o)),    f(y) = silu(y) or y

x(j, o) is the input o tokens before row j on its own path: that of a node above it, then of the
slot's tail, which holds the input of position p at place p % (W - 1), and zero before the text
begins. The sum is at least float32 and rounded once, and f is applied to the rounded sum, as by
PyTorch's convolution and activation.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.checks import check_tensor
from csd.kernels.common.operator import operator
from csd.kernels.states.paths import DEPTHS
from csd.state.recurrent import wide

BLOCK_C = 256


def tree_conv_ref(
    x: torch.Tensor,  # [M, C]
    weight: torch.Tensor,  # [C, W]
    bias: torch.Tensor | None,  # [C]
    tail: torch.Tensor,  # [S, W - 1, C]
    slot: torch.Tensor,  # [M] int32
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, DEPTHS] int32
    silu: bool,
) -> torch.Tensor:
    """Returns [M, C]. Plain PyTorch with fixed shapes; nothing is read on the host."""
    W, kind = weight.shape[1], wide(x.dtype)
    s, live = slot.clamp(min=0).long(), slot >= 0
    depth = (path >= 0).sum(1) - 1
    y = torch.zeros(x.shape, dtype=kind, device=x.device)
    if bias is not None:
        y = y + bias.to(kind)
    for back in range(W - 1, -1, -1):
        row = path.gather(1, (depth - back).clamp(min=0)[:, None])[:, 0].clamp(min=0).long()
        column = x[row]
        if back:
            p = position - back
            before = torch.where((p >= 0)[:, None], tail[s, (p % (W - 1)).long()], 0)
            column = torch.where((depth >= back)[:, None], column, before)
        y = y + weight[:, W - 1 - back].to(kind) * column.to(kind)
    y = y.to(x.dtype)
    if silu:
        # on a CPU, the rounding of PyTorch's `silu` depends on the element's index
        y = (y.to(kind) / y.to(kind).neg().exp_().add_(1)).to(x.dtype)
    return torch.where(live[:, None], y, 0)


def tree_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tail: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """One launch."""

    import triton
    import triton.language as tl

    from csd.kernels.states.triton.conv import _tree_conv_kernel

    M, C = x.shape
    y = torch.empty_like(x)
    block = min(BLOCK_C, triton.next_power_of_2(C))
    _tree_conv_kernel[(M, triton.cdiv(C, block))](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        tail_ptr=tail,
        slot_ptr=slot,
        position_ptr=position,
        path_ptr=path,
        y_ptr=y,
        C=C,
        W=weight.shape[1],
        DEPTHS=DEPTHS,
        SILU=silu,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK_C=block,
        BLOCK_D=triton.next_power_of_2(DEPTHS),
        num_warps=4,
    )
    return y


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu import conv

    return (lambda *args: conv.reads_conv(*args[:4])), conv.tree_conv


_tree_conv = operator(
    "tree_conv",
    tree_conv_ref,
    tree_conv_triton,
    loop=_loop,
    fake=lambda x, *others: torch.empty_like(x),
)


def tree_conv(
    x: torch.Tensor,  # [M, C]
    weight: torch.Tensor,  # [C, W], 2 <= W <= 17, the weight of the oldest input first
    bias: torch.Tensor | None,  # [C]
    tail: torch.Tensor,  # [S, W - 1, C]
    slot: torch.Tensor,  # [M] int32, -1 in padding
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, 17] int32, of `csd.kernels.tree_paths`
    silu: bool = False,
) -> torch.Tensor:
    """Returns [M, C] in x's dtype, which is also that of the weights; zeros in padding."""
    device = x.device
    check_tensor("x", x, (None, None), None, device)
    M, C = x.shape
    check_tensor("weight", weight, (C, None), x.dtype, device)
    W = weight.shape[1]
    if not 2 <= W <= DEPTHS:
        raise ValueError(f"weight must have 2 to {DEPTHS} columns, got {W}")
    if bias is not None:
        check_tensor("bias", bias, (C,), x.dtype, device)
    check_tensor("tail", tail, (None, W - 1, C), x.dtype, device)
    for name, y, shape in (
        ("slot", slot, (M,)),
        ("position", position, (M,)),
        ("path", path, (M, DEPTHS)),
    ):
        check_tensor(name, y, shape, torch.int32, device)
    return _tree_conv(x, weight, bias, tail, slot, position, path, silu)
