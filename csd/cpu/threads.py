"""Loops in as many threads as PyTorch has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numba
import torch

from csd.cpu.compiled import compiled, loop

# numbers that a loop computes, below which a second thread gains little, and loses much where
# another process has its core
LEAST = 1 << 17


@dataclass(frozen=True, slots=True)
class ByThreads:
    """A loop compiled twice: for one thread, and for as many as PyTorch has."""

    alone: Any
    together: Any

    def __call__(self, numbers: int, *args: Any) -> Any:
        """numbers: how many it computes."""
        return self.together(*args) if many(numbers) else self.alone(*args)


def by_threads(function: Callable) -> ByThreads:
    """`function` with its `prange` in PyTorch's number of threads, where it computes enough."""
    # numba's cache identifies functions by their names, not by how they are compiled
    twin = FunctionType(function.__code__, function.__globals__, function.__name__)
    twin.__qualname__ = f"{function.__name__}_together"
    return ByThreads(loop(function), compiled(twin, parallel=True))


def many(numbers: int) -> bool:
    """True if so many numbers are worth a second thread; sets the number that numba takes.

    Asked before each call of a loop that may run in several threads, or that calls one.
    """
    _begin()
    if numbers < LEAST or (count := threads()) == 1:
        return False
    numba.set_num_threads(count)
    return True


@cache
def _begin() -> None:
    """Links the functions of numba's threads.

    numba does so where it loads a loop of several threads from its cache, and not where it loads
    one that was compiled while the loops that it calls came from there: its calls would go to 0.
    As it begins, it gives OpenMP, and with it PyTorch, as many threads as there are cores.
    """
    count = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(count)


def threads() -> int:
    """PyTorch's threads, or one where numba has none that several callers may use at once."""
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return min(torch.get_num_threads(), most) if _shared() else 1


@cache
def _shared() -> bool:
    """True if numba was built with OpenMP or TBB; its own threads end a process that two share."""
    from importlib.util import find_spec

    return any(find_spec(f"numba.np.ufunc.{name}") for name in ("omppool", "tbbpool"))
