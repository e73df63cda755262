"""Launches of Triton's kernels go to the machine of `machine.py`."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .machine import Kernel
from .text import parse

CHIPS = {"sm_80": 80, "sm_90": 90}
# with warmup=True nothing is launched
_compile = JITFunction.run


@cache
def _kernel(ptx: str) -> Kernel:
    return Kernel(parse(ptx))


@contextmanager
def emulated(target: str = "sm_90", seed: int | None = 0):
    """Kernels launched on tensors of the CPU are compiled for the target, and what Triton wrote for
    it runs on their memory. `TRITON_INTERPRET` must have been off when triton was imported.

    seed: of the order in which programs and warps run (`Kernel.launch`).
    """
    no_device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CHIPS[target], 32),
        # a launch looks for what was compiled for the device of this number
        get_current_device=lambda: CHIPS[target],
        get_current_stream=lambda device=None: 0,
    )

    def run(kernel, *args, grid, warmup, **options):
        compiled = _compile(kernel, *args, grid=grid, warmup=True, **options)
        bound = kernel.signature.bind(*args, **_of(kernel, options))
        bound.apply_defaults()
        kinds = compiled.src.signature
        values, places = [], []
        for value in _flat(bound.arguments.values(), kinds.values()):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                places.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
                value = value.data_ptr()
            values.append(value)
        if callable(grid):
            grid = grid(dict(bound.arguments))
        sizes = (*grid, 1, 1)[:3]
        machine = _kernel(compiled.asm["ptx"])
        # two kinds of scratch memory that nothing asks for
        values += [0] * (len(machine.code.params) - len(values))
        machine.launch(sizes, values, places, compiled.metadata.shared, seed)
        return compiled

    before = driver._active
    driver.set_active(no_device)
    try:
        with mock.patch.object(JITFunction, "run", run):
            yield
    finally:
        driver._active = before


def _flat(values, kinds):
    """The values that are parameters of the PTX: of tuples their elements, and no constants."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(value, kind)
        elif kind != "constexpr":
            yield value


def _of(kernel, options: dict) -> dict:
    """Without what is the compiler's: num_warps, num_stages and their like."""
    names = {p.name for p in kernel.params}
    return {k: v for k, v in options.items() if k in names}
