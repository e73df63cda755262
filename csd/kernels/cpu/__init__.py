"""Operations of a step as loops that numba compiles for the CPU at hand: `pip install csd[cpu]`.

A loop takes one call where the references take ten, and a row alone decides what it does with that
row. Where numba is not installed an engine on a CPU runs the references. Both do the same
arithmetic; only sums and exponentials are rounded in another order.
"""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def compiles() -> bool:
    """Whether numba is installed, and the CPU multiplies and adds at once, as the loops do."""
    fused = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return fused and find_spec("numba") is not None
