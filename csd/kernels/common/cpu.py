"""Conditions of the backend "cpu": operations of a step as loops that numba compiles for this CPU.

A loop is one call where the references are ten, and the result of a row depends on that row alone.
Both do the same arithmetic; only sums and exponentials are rounded in another order.

This file does not import numba: callers check `compiles` first and then import
`csd.kernels.cpu_ops`, which has everything that other packages use.
"""

from functools import cache
from importlib.util import find_spec

import torch

# dtypes of tensors that loops read
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def fused_arithmetic() -> bool:
    """True if the CPU has fused multiply-add, which the loops use."""
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@cache
def compiles() -> bool:
    """True if loops can be compiled on this machine: fused multiply-add and numba are present."""
    return fused_arithmetic() and find_spec("numba") is not None
