"""Operations of a step as loops that numba compiles for the CPU at hand: `pip install csd[cpu]`.

A loop takes one call where the references take ten, and a row alone decides what it does with that
row. Where numba is not installed an engine on a CPU runs the references. Both do the same
arithmetic; only sums and exponentials are rounded in another order.
"""

import platform
from functools import cache
from importlib.util import find_spec

import torch


@cache
def compiles() -> bool:
    """Whether numba is installed, and the CPU multiplies and adds at once, as the loops do."""
    fused = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return fused and find_spec("numba") is not None


def multiplies(dtype: torch.dtype) -> bool:
    """Whether the loop of products (`products.py`) is the one to take here.

    Where numba has as many threads as PyTorch, and the loop has an instruction for this CPU.
    """
    if instruction(dtype) is None:
        return False
    from csd.kernels.cpu.threads import threads

    return threads() >= torch.get_num_threads()


def in_loops(weight: torch.Tensor) -> bool:
    """Whether a loop multiplies a weight: one laid out by `products.by_columns`, or a plain one."""
    if weight.dim() == 3:
        return True
    if not weight.is_cpu or not multiplies(weight.dtype):
        return False
    from csd.kernels.cpu.plain import fits

    return fits(weight)


@cache
def instruction(dtype: torch.dtype) -> str | None:
    """By which instruction the loop multiplies here, one of `tiles.BY`; None: oneDNN multiplies.

    By the CPU's kind, and never by a measurement: tokens must not depend on one. AVX512-BF16's
    multiplies twice as many numbers as an FMA does on AMD's CPUs; Intel's take as long for them.
    bfloat16 is oneDNN's where it can use AMX's tiles, which the loop does not.
    """
    from csd.kernels.cpu.lanes import CPU

    has = instructions(dtype)
    if dtype == torch.bfloat16 and has_amx():
        return None
    if "dot" in has and CPU.startswith("znver"):
        return "dot"
    return "fma" if has else None


@cache
def instructions(dtype: torch.dtype) -> tuple[str, ...]:
    """Those of `tiles.BY` that multiply numbers of a dtype on this CPU."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    if not compiles() or not x86 or dtype not in (torch.bfloat16, torch.float32):
        return ()
    if dtype == torch.float32:
        return ("fma",)
    from csd.kernels.cpu.lanes import FEATURES

    return ("fma", "dot") if "+avx512bf16" in FEATURES else ("fma",)


@cache
def has_amx() -> bool:
    """Whether the CPU has AMX's tiles and the system lets this process use them."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
