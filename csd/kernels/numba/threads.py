"""Loops that run in PyTorch's number of threads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numba
import torch

from csd.kernels.numba.jit import compiled, loop

# numbers that a loop must compute to run in several threads: below, a second thread gains little,
# and loses much where another process uses its core
LEAST = 1 << 17


@dataclass(frozen=True, slots=True)
class ByThreads:
    """A loop compiled twice: for one thread, and for several."""

    alone: Any
    together: Any

    def __call__(self, numbers: int, *args: Any) -> Any:
        """Run the version that suits `numbers`, the amount of numbers that the call computes."""
        return self.together(*args) if many(numbers) else self.alone(*args)


def by_threads(function: Callable) -> ByThreads:
    """`function` with its `prange` in PyTorch's number of threads in calls that compute enough."""
    # numba's cache identifies functions by their names, not by how they are compiled
    twin = FunctionType(function.__code__, function.__globals__, function.__name__)
    twin.__qualname__ = f"{function.__name__}_together"
    return ByThreads(loop(function), compiled(twin, parallel=True))


def many(numbers: int) -> bool:
    """True if a call that computes `numbers` numbers should use several threads; sets numba's.

    Call it before each call of a loop that may run in several threads, or that calls such a loop.
    """
    _begin()
    if numbers < LEAST or (count := threads()) == 1:
        return False
    numba.set_num_threads(count)
    return True


@cache
def _begin() -> None:
    """Links the functions of numba's threading layer, once.

    numba does so when it loads a parallel loop from its cache, but not when it loads one that was
    compiled while the loops that it calls came from the cache: its calls would jump to address 0.
    Linking sets the threads of OpenMP, and so of PyTorch, to the number of cores; they are reset.
    """
    count = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(count)


def threads() -> int:
    """Number of threads: PyTorch's, at most numba's; 1 if callers cannot share numba's threads."""
    limit: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return min(torch.get_num_threads(), limit) if _shared() else 1


@cache
def _shared() -> bool:
    """True if numba has OpenMP or TBB; two callers of its own thread pool abort the process."""
    from importlib.util import find_spec

    return any(find_spec(f"numba.np.ufunc.{name}") for name in ("omppool", "tbbpool"))
