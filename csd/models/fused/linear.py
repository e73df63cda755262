"""Products x W^T + b, as fast for the few rows of a decoding step as the machine allows."""

import platform
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

from csd.kernels.common.cpu import compiles
from csd.kernels.layers.quantized import Quantized, has_loop, quantized_linear

# not every build of PyTorch has oneDNN, and `mkldnn.enabled` is on without it too
ONEDNN = torch.backends.mkldnn.is_available()


@cache
def multiplies_bfloat16() -> bool:
    """True if oneDNN multiplies bfloat16 with CPU instructions: AVX512-BF16, AMX, or Arm's."""
    return onednn_multiplies(torch.bfloat16) and (
        torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
        or platform.machine() in ("aarch64", "arm64")
    )


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies this dtype here; ONEDNN_MAX_CPU_ISA may disable it."""
    if not ONEDNN or dtype == torch.float64:
        return False
    x = torch.ones(2, 16, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [M, in], weight: [out, in], plain, `packed` or quantised, bias: [out]. Returns [M, out].

    On a CPU, `F.linear` in float32 is MKL's matrix product, if PyTorch has it, and slow for a few
    rows; oneDNN's is not, and csd's own loop is faster than both in most cases
    (`python -m bench products`).
    """
    if isinstance(weight, Quantized):
        return quantized_linear(x, weight, bias)
    if in_loops(weight):
        return _loops().product(x, weight, bias)
    if weight.is_mkldnn or _onednn(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """`weight` in the layout of csd's loop or oneDNN; unchanged if neither multiplies it."""
    if weight.device.type != "cpu" or isinstance(weight, Quantized):
        return weight
    if compiles() and _loops().multiplies(weight.dtype) and _loops().fits(weight):
        return _loops().by_columns(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32) if _onednn(weight) else weight


def by_rows(weight: torch.Tensor) -> torch.Tensor:
    """The plain weight [out, in] of one that `packed` laid out; other tensors unchanged."""
    if weight.is_mkldnn:
        return weight.to_dense()
    return _loops().by_rows(weight) if weight.dim() == 3 and weight.is_cpu else weight


def in_loops(weight: torch.Tensor) -> bool:
    """True if csd's loop multiplies a weight, plain, `packed` or quantised."""
    if isinstance(weight, Quantized):
        return has_loop()
    return weight.is_cpu and compiles() and _loops().in_loops(weight)


def add_rounded(total: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total + x, added in the wider of their dtypes, as `dtype`; total may be written."""
    if total.is_cpu and total.dtype == dtype and compiles() and _loops().add(x, total):
        return total
    return (total + x).to(dtype)


@cache
def _loops() -> ModuleType:
    from csd.kernels import cpu_ops as backend

    return backend


def _onednn(x: torch.Tensor) -> bool:
    if x.device.type != "cpu" or not ONEDNN or not torch.backends.mkldnn.enabled:
        return False
    if x.dtype == torch.bfloat16:
        return multiplies_bfloat16()
    return x.dtype == torch.float32
