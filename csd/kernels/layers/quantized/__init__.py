"""Product with a matrix in the blocks of a GGUF file, which is not unpacked.

    y[m, n] = bias[n] + sum over groups g of 16 k of
        s(x)[m, g] (s(w)[n, g] sum over k of (q(w)[n, k] - offset) q(x)[m, k]
                    + l(w)[n, g] sum over k of q(x)[m, k])

w's numbers q, scales s and minima l are the file's (`formats`); x [M, K] float32 is rounded to int8
(`rounding`). A group's sums are integers, and so exact; they are added in float32 in the order of
k, each with one rounding (the minima of 32 k together). So the bits of a row depend neither on the
number of rows, nor on threads, nor on the CPU's instructions.

A step of few rows lasts as long as its weights take to be read, and a file of 4 bits has 30% of the
bytes of bfloat16.
"""

from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.common.cpu import compiles
from csd.kernels.layers.quantized.rounding import round_rows_ref
from csd.kernels.layers.quantized.tensor import Quantized, QuantizedStack

__all__ = ["Quantized", "QuantizedStack", "has_loop", "quantized_linear", "quantized_linear_ref"]

# numbers of a matrix that the reference dequantises at once
CHUNK = 1 << 24


def quantized_linear_ref(
    x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain PyTorch: the rounded rows times the dequantised matrix, in float64, rounded once."""
    rows = round_rows_ref(x.float()).double()
    ids = torch.arange(weight.shape[0]).split(max(1, CHUNK // weight.shape[1]))
    y = torch.cat([F.linear(rows, weight.rows(part).double()) for part in ids], 1)
    return (y if bias is None else y + bias).float()


def quantized_linear(
    x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias. x: [.., K] float32, weight: [N, K], bias: [N]. Returns [.., N] float32.

    In csd's loop where `has_loop`, else by the reference, which dequantises W and is slow.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x must be float32 for a quantised weight, got {x.dtype}")
    product = _loops().product if has_loop() else quantized_linear_ref
    out: torch.Tensor = product(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], -1)


def has_loop() -> bool:
    """True if this CPU has the instructions of the loops, and numba is installed."""
    return compiles() and bool(_loops().instructions())


def _loops() -> Any:
    from csd.kernels.layers.quantized.cpu import product

    return product
