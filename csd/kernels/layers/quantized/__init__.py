"""Product with a matrix in the blocks of a GGUF file, which is not unpacked.

    y[m, n] = bias[n] + sum over groups g of 16 k of
        s(x)[m, g] (s(w)[n, g] sum over k of (q(w)[n, k] - offset) q(x)[m, k]
                    + l(w)[n, g] sum over k of q(x)[m, k])

w's numbers q, scales s and minima l are the file's (`formats`); x [M, K] float32 is rounded to int8
(`rounding`). A group's sums are integers, and so exact; they are added in float32 in the order of
k, each with one rounding (the minima of 32 k together). So the bits of a row depend neither on the
number of rows, nor on threads, nor on the CPU's instructions.

The gradient of x is that of the dequantised w: the rounding of x counts as the identity.

A step of few rows lasts as long as its weights take to be read, and a file of 4 bits has 30% of the
bytes of bfloat16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.common.cpu import compiles
from csd.kernels.layers.quantized.rounding import round_rows_ref
from csd.kernels.layers.quantized.tensor import Quantized, QuantizedStack, stored

__all__ = [
    "Quantized",
    "QuantizedStack",
    "has_loop",
    "quantized_linear",
    "quantized_linear_ref",
    "quantized_matmul",
    "stored",
    "unrounded",
]

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
    if _leaves_x.get():
        product = _unrounded_linear
    out: torch.Tensor = product(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], -1)


_leaves_x = ContextVar("unrounded", default=False)


@contextmanager
def unrounded() -> Iterator[None]:
    """Context in which products leave x as it is: plain ones, with the dequantised W.

    Any difference may round a number of x to the next integer, by 1 / 127 of its block's largest,
    and later layers add to that. So a comparison of two ways to compute a model leaves x unrounded.
    """
    before = _leaves_x.set(True)
    try:
        yield
    finally:
        _leaves_x.reset(before)


def _unrounded_linear(
    x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for rows, part in _dequantized(weight):
        out[:, rows] = x @ part.T
    return out if bias is None else out + bias


def quantized_matmul(x: torch.Tensor, weight: Quantized) -> torch.Tensor:
    """x W in float32, without a gradient of its own. x: [.., N], weight: [N, K].

    A few rows of W at a time are dequantised, into one piece of memory.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("x @ W of a quantised W has no gradient; use F.linear")
    flat = x.reshape(-1, x.shape[-1])
    out = flat.new_zeros(flat.shape[0], weight.shape[1])
    for rows, part in _dequantized(weight):
        out.addmm_(flat[:, rows], part)
    return out.view(*x.shape[:-1], -1)


def _dequantized(weight: Quantized) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield consecutive rows of W, and these rows in float32, valid until the next ones."""
    if has_loop():
        from csd.kernels.layers.quantized.cpu.dequantize import dequantized

        yield from dequantized(weight)
        return
    for ids in torch.arange(weight.shape[0]).split(max(1, CHUNK // weight.shape[1])):
        yield slice(int(ids[0]), int(ids[-1]) + 1), weight.rows(ids)


def has_loop() -> bool:
    """True if this CPU has the instructions of the loops, and numba is installed."""
    return compiles() and bool(_loops().instructions())


def _loops() -> Any:
    from csd.kernels.layers.quantized.cpu import product

    return product
