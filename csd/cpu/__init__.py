"""The backend "cpu": operations of a step as loops that numba compiles for the CPU at hand.

A loop takes one call where the references take ten, and a row alone decides what it does with that
row. Both do the same arithmetic; only sums and exponentials are rounded in another order. No loop
runs another backend's operation in its place.

This file imports no numba: `compiles` is asked first, and then `csd.cpu.entry` is imported, which
has all that other packages use.
"""

from functools import cache
from importlib.util import find_spec

import torch

# of the tensors that loops read
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def fused_arithmetic() -> bool:
    """True if the CPU multiplies and adds at once, as the loops do."""
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@cache
def compiles() -> bool:
    """True if loops can be compiled here."""
    return fused_arithmetic() and find_spec("numba") is not None
