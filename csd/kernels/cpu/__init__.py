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

    Where numba has as many threads as PyTorch, and this CPU's kind is one on which it is faster.
    """
    if not _is_faster(dtype):
        return False
    from csd.kernels.cpu.threads import threads

    return threads() >= torch.get_num_threads()


@cache
def _is_faster(dtype: torch.dtype) -> bool:
    """By the CPU's kind, and never by a measurement: tokens must not depend on one.

    In bfloat16 not with AMX, nor on AMD's CPUs with AVX512-BF16, where oneDNN's products of 25 rows
    take 1.6 times as long as of one (`python -m bench.step_parts`).
    """
    if not compiles() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if dtype != torch.bfloat16:
        return dtype == torch.float32
    if torch.cpu._is_amx_tile_supported():
        return False
    return not (torch.cpu._is_avx512_bf16_supported() and _of_amd())


def _of_amd() -> bool:
    from csd.kernels.cpu.lanes import CPU

    return CPU.startswith("znver")
