"""Choice of the multiply instruction for the loops of products and of attention."""

import platform
from functools import cache

import torch

from csd.kernels.common.cpu import compiles
from csd.kernels.numba import lanes
from csd.kernels.numba.threads import threads


def instruction(dtype: torch.dtype) -> str | None:
    """The loops' instruction for a dtype on this CPU, a name of `tiles.ISA`; None: oneDNN is used.

    The CPU's kind decides, never a measurement: tokens must not depend on one. On AMD's CPUs the
    instruction of AVX512-BF16 multiplies twice as many numbers as an FMA; on Intel's it takes as
    long per number. oneDNN multiplies bfloat16 where it can use AMX's tiles, which the loop
    does not.
    """
    has = instructions(dtype)
    if dtype == torch.bfloat16 and has_amx():
        return None
    if "dot" in has and lanes.CPU.startswith("znver"):
        return "dot"
    return "fma" if has else None


@cache
def instructions(dtype: torch.dtype) -> tuple[str, ...]:
    """Names in `tiles.ISA` of the instructions that multiply a dtype on this CPU."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    if not compiles() or not x86 or dtype not in (torch.bfloat16, torch.float32):
        return ()
    has_dot = dtype == torch.bfloat16 and "+avx512bf16" in lanes.FEATURES
    return ("fma", "dot") if has_dot else ("fma",)


@cache
def has_amx() -> bool:
    """True if the CPU has AMX's tiles and the operating system lets this process use them."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def multiplies(dtype: torch.dtype) -> bool:
    """True if products of a dtype should run in csd's own loop on this machine.

    It needs an instruction for this CPU, and as many threads of numba as PyTorch has.
    """
    return instruction(dtype) is not None and threads() >= torch.get_num_threads()
