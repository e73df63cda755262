"""SwiGLU of a batch-invariant matrix product, in one launch if K is not split.

    y[m, f] = silu(g[m, f]) * u[m, f],    g = x Wg^T,  u = x Wu^T

The weight's first F rows are Wg, the others Wu. A program computes the same columns of both
products, each in its own accumulator and in the order of `row_linear`, rounds them and applies the
activation before it stores. So the result has the bits of `swiglu` of `row_linear`
(`csd/kernels/layers/swiglu.py`, `csd/kernels/layers/row_linear.py`).
"""

import torch

from csd.kernels.common.gpu import dependent_options
from csd.kernels.common.operator import operator
from csd.kernels.layers.row_linear import (
    check_product,
    product_tiles,
    row_linear_ref,
    row_linear_triton,
    splits_of,
)
from csd.kernels.layers.swiglu import swiglu_ref, swiglu_triton


def gated_linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [M, K], weight: [2F, K]. Returns [M, F]."""
    return swiglu_ref(row_linear_ref(x, weight))


def gated_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """One launch, or three if `splits_of` splits K. weight and x's rows: contiguous; bias: None."""

    import triton

    from csd.kernels.layers.triton.linear import gated_linear_kernel

    (M, K), F = x.shape, weight.shape[0] // 2
    if bias is not None:
        raise ValueError("gated_linear has no bias")
    if splits_of(2 * F, K, x.dtype)[0] > 1:
        return swiglu_triton(row_linear_triton(x, weight))
    y = torch.empty(M, F, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    tiles = product_tiles(x, K, gated_linear_kernel)
    block_f = tiles.pop("BLOCK_N") // 2
    dependent = dependent_options(gated_linear_kernel)
    gated_linear_kernel[(triton.cdiv(M, tiles["BLOCK_T"]), triton.cdiv(F, block_f))](
        x_ptr=x,
        w_ptr=weight,
        y_ptr=y,
        M=M,
        F=F,
        K=K,
        x_stride=x.stride(0),
        BLOCK_F=block_f,
        AHEAD=tiles["num_stages"] - 1,
        **tiles,
        **dependent,
    )
    return y


_gated_linear = operator(
    "gated_linear",
    gated_linear_ref,
    gated_linear_triton,
    fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0] // 2),
)


def gated_linear(
    x: torch.Tensor,  # [M, K], rows contiguous
    weight: torch.Tensor,  # [2F, K]: rows of the gate, then of up
) -> torch.Tensor:
    """Returns silu(x Wg^T) * (x Wu^T) [M, F]; all of one dtype: float16, bfloat16 or float32."""
    check_product(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must be [2F, K], got {tuple(weight.shape)}")
    return _gated_linear(x, weight)
