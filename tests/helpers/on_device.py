"""Kernels launched on tensors of the CPU run on a device, on copies that come back.

So the kernels' tests, whose tensors are the CPU's, test what is compiled for the GPU at hand: a
third way beside the interpreter and the machine for PTX.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from helpers.checks.nested import mapped
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from csd.kernels.common.gpu import Chip, chip_of

# modules whose tiles depend on the chip
TILED = (
    "attention.triton.launch",
    "layers.row_linear",
    "attention.triton.exact",
    "attention.packed.triton.forward",
    "attention.packed.triton.backward",
)


class Copies:
    """Tensors of the CPU on a device: views of one memory stay views of one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._bytes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, x):
        """A tensor's likeness there, of the same place in its memory; all else as it is."""
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        memory = x.untyped_storage()
        if memory.data_ptr() not in self._bytes:
            host = torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
            # a copy, on the same device too
            there = torch.empty_like(host, device=self._device).copy_(host)
            self._bytes[memory.data_ptr()] = host, there
        _, there = self._bytes[memory.data_ptr()]
        like = torch.empty(0, dtype=x.dtype, device=there.device)
        return like.set_(there.untyped_storage(), x.storage_offset(), x.size(), x.stride())

    def bring_back(self) -> None:
        for host, there in self._bytes.values():
            host.copy_(there)


def launching_on(launch: Callable, device: torch.device) -> Callable:
    """`launch(kernel, *args, **options)` of a kernel, on copies of the CPU's tensors."""

    def run(kernel, *args, **options):
        copies = Copies(device)
        args, options = mapped(copies.of, (args, options))
        found = launch(kernel, *args, **options)
        copies.bring_back()
        return found

    return run


class Active:
    """Triton's driver, but none to `kernels.backends`, which would refuse the CPU's tensors."""

    def __init__(self, of):
        self._of = of

    def __getattr__(self, name):
        return getattr(self._of, name)


@contextmanager
def on_device(device: torch.device):
    """Within the block, launches on tensors of the CPU run on `device`, with its own tiles."""
    before = driver.active
    driver.set_active(Active(before))
    try:
        with ExitStack() as stack:
            patch = mock.patch.object(JITFunction, "run", launching_on(JITFunction.run, device))
            stack.enter_context(patch)
            own = chip_of

            def chip(of: torch.device) -> Chip:
                return own(device if of.type == "cpu" else of)

            for module in TILED:
                stack.enter_context(mock.patch(f"csd.kernels.{module}.chip_of", chip))
            yield
    finally:
        driver.set_active(before)
