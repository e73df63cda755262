"""The instruction that multiplies in the loops of products and of attention."""

import platform
from functools import cache

import torch

from csd.cpu import compiles, lanes
from csd.cpu.threads import threads


def instruction(dtype: torch.dtype) -> str | None:
    """The instruction that the loop multiplies by here, of `tiles.ISA`; None: oneDNN multiplies.

    By the CPU's kind, and never by a measurement: tokens must not depend on one. AVX512-BF16's
    multiplies twice as many numbers as an FMA does on AMD's CPUs; Intel's take as long for them.
    bfloat16 is oneDNN's where it can use AMX's tiles, which the loop does not.
    """
    has = instructions(dtype)
    if dtype == torch.bfloat16 and has_amx():
        return None
    if "dot" in has and lanes.CPU.startswith("znver"):
        return "dot"
    return "fma" if has else None


@cache
def instructions(dtype: torch.dtype) -> tuple[str, ...]:
    """Instructions of `tiles.ISA` that multiply numbers of a dtype on this CPU."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    if not compiles() or not x86 or dtype not in (torch.bfloat16, torch.float32):
        return ()
    if dtype == torch.float32:
        return ("fma",)
    return ("fma", "dot") if "+avx512bf16" in lanes.FEATURES else ("fma",)


@cache
def has_amx() -> bool:
    """True if the CPU has AMX's tiles and the system lets this process use them."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def multiplies(dtype: torch.dtype) -> bool:
    """True if the loop of products (`products.py`) is to be taken here.

    Where numba has as many threads as PyTorch, and the loop has an instruction for this CPU.
    """
    return instruction(dtype) is not None and threads() >= torch.get_num_threads()
