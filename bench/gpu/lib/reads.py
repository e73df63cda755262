"""Launches and reads of a tensor by kernel, counted while kernels run without a GPU.

Kernels are interpreted by Triton, or run as compiled by `tools/ptx` (inside its `emulated`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch


@dataclass
class Reads:
    """Names of the launched kernels in order, and the bytes of the tensor that each has loaded."""

    launches: list[str] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)

    def begin(self, kernel: Any) -> None:
        name = kernel.__name__.removesuffix("_kernel")
        self.launches.append(name)
        self.loaded.setdefault(name, 0)

    def add(self, addresses: np.ndarray, size: int, begin: int, end: int) -> None:
        inside = len(np.unique(addresses[(addresses >= begin) & (addresses < end)]))
        if inside:
            self.loaded[self.launches[-1]] += inside * size


@contextmanager
def counted(tensor: torch.Tensor, compiled: bool) -> Iterator[Reads]:
    """Counts the launches and the loads from `tensor` of the context.

    compiled: the kernels run as compiled, on the machine of `tools/ptx`, not interpreted.
    """
    storage, reads = tensor.untyped_storage(), Reads()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    with ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable) -> None:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

        if compiled:
            from ptx.memory import Global
            from triton.runtime.jit import JITFunction

            def launch(run: Callable) -> Callable:
                def launched(kernel, *args, **options):
                    reads.begin(kernel)
                    return run(kernel, *args, **options)

                return launched

            def load(read: Callable) -> Callable:
                def loaded(memory, crew, addresses, size, count, mask, i):
                    at = addresses if mask is True else addresses[mask]
                    reads.add(at, size * count, begin, end)
                    return read(memory, crew, addresses, size, count, mask, i)

                return loaded

            replace(JITFunction, "run", launch)
            replace(Global, "load", load)
        else:
            from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

            def launch(run: Callable) -> Callable:
                def launched(executor, *args, **options):
                    reads.begin(executor.fn)
                    return run(executor, *args, **options)

                return launched

            def load(read: Callable) -> Callable:
                def loaded(builder, ptrs, mask, *more):
                    size = ptrs.get_element_ty().primitive_bitwidth // 8
                    reads.add(ptrs.data[mask.data], size, begin, end)
                    return read(builder, ptrs, mask, *more)

                return loaded

            replace(GridExecutor, "__call__", launch)
            replace(InterpreterBuilder, "create_masked_load", load)
        yield reads
