"""SwiGLU of a batch-invariant matrix product, in one launch if K is not split.

    y[m, f] = silu(g[m, f]) * u[m, f],    g = x Wg^T,  u = x Wu^T

The weight's first F rows are Wg, the others Wu. A program computes the same columns of both
products, each in its own accumulator and in the order of `row_linear`, rounds them and applies the
activation before it stores. So the result has the bits of `swiglu` of `row_linear`
(`csd/kernels/layers/swiglu.py`, `csd/kernels/layers/row_linear.py`).
"""

import torch
import triton
import triton.language as tl

from csd.kernels.common.gpu import dependent_options, launch_next, prefetch, wait_for_previous
from csd.kernels.common.operator import operator
from csd.kernels.layers.row_linear import (
    check_product,
    product_tiles,
    row_linear_ref,
    row_linear_triton,
    splits_of,
)
from csd.kernels.layers.swiglu import silu_times, swiglu_ref, swiglu_triton


def gated_linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [M, K], weight: [2F, K]. Returns [M, F]."""
    return swiglu_ref(row_linear_ref(x, weight))


@triton.jit(do_not_specialize=["M"])
def _gated_linear_kernel(
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


def gated_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """One launch, or three if `splits_of` splits K. weight and x's rows: contiguous; bias: None."""
    (M, K), F = x.shape, weight.shape[0] // 2
    if bias is not None:
        raise ValueError("gated_linear has no bias")
    if splits_of(2 * F, K, x.dtype)[0] > 1:
        return swiglu_triton(row_linear_triton(x, weight))
    y = torch.empty(M, F, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    tiles = product_tiles(x, K, _gated_linear_kernel)
    block_f = tiles.pop("BLOCK_N") // 2
    dependent = dependent_options(_gated_linear_kernel)
    _gated_linear_kernel[(triton.cdiv(M, tiles["BLOCK_T"]), triton.cdiv(F, block_f))](
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
