"""The compilation jobs of a target, taken from launches: nothing is compiled, run or declared.

A launch goes Triton's own way up to the compiler, for a driver without a device that names the
target. What Triton would compile there is recorded: types, alignment, constants and warps are
those that the JIT finds, so a launch on such a GPU finds the binary of a job in Triton's cache. It
needs a process in which triton was imported without TRITON_INTERPRET.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from bench.gpu.aot.launches import launches
from bench.lib.kernel_shape import Shape
from csd.kernels.target import Chip


@dataclass(frozen=True, slots=True)
class Target:
    """backend, arch, warp: what Triton calls the GPU; chip: as kernels know it."""

    backend: str
    arch: int | str
    warp: int
    chip: Chip

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program may use."""
        return self.chip.shared

    @property
    def gpu(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.warp)


def named(target: str) -> Target:
    """A chip by its compiler's name: sm_ and the compute capability, or gfx and AMD's number."""
    if target.startswith("gfx"):
        return Target("hip", target, 64, Chip.of("gfx942"))
    return Target("cuda", int(target.removeprefix("sm_")), 32, Chip.of(target))


# those that `make aot` compiles for
TARGETS = {
    name: named(name) for name in ("sm_90", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942")
}
# constants that a job's name shows, where its kernel has them
SHOWN = ("F", "D", "ORDERS", "N", "BLOCK_T", "PARTS", "MOVED", "SOLVE")


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One specialisation of a kernel. source: Triton's ASTSource."""

    name: str
    source: Any
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True  # whether a product and a sum may become one instruction
    launch_pdl: bool = False  # whether it begins before its predecessor has ended

    @property
    def options(self) -> dict:
        names = "num_warps", "num_stages", "enable_fp_fusion"
        found = {name: getattr(self, name) for name in names}
        # not every backend has it
        return found | ({"launch_pdl": True} if self.launch_pdl else {})

    @property
    def key(self) -> tuple:
        """Equal for jobs, and launches, that share a binary."""
        return self.source.hash(), self.num_warps, self.num_stages, self.enable_fp_fusion


@contextmanager
def recording(target: str) -> Iterator[list[CompileJob]]:
    """A list that receives what kernels launched within, on tensors of any device, compile from."""
    jobs: list[CompileJob] = []
    made = named(target)

    def hook(*, fn: Any, compile: dict, **_: Any) -> bool:
        kernel, constants, (attrs,) = fn.jit_function, compile["constants"], compile["configs"]
        source = ASTSource(kernel, compile["signature"], constants, attrs)
        options = (compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion"))
        # `csd.kernels.dependent_launch` sets both
        named = {kernel.arg_names[path[0]]: value for path, value in constants.items()}
        pdl = bool(named.get("PDL")) and "AHEAD" in named
        jobs.append(CompileJob(_name(kernel, constants), source, *options, launch_pdl=pdl))
        # as if it were compiled: the launch ends here
        return True

    without_device = SimpleNamespace(
        get_current_target=lambda: made.gpu,
        # Triton caches a target's properties by the device
        get_current_device=lambda: target,
        get_current_stream=lambda device=None: 0,
    )
    before = knobs.runtime.jit_cache_hook
    with (
        mock.patch.object(driver, "_active", without_device),
        mock.patch("csd.kernels.tree_attention.launch.chip_of", lambda device: made.chip),
        mock.patch("csd.kernels.row_linear.chip_of", lambda device: made.chip),
        mock.patch("csd.kernels.exact_attention.launch.chip_of", lambda device: made.chip),
    ):
        knobs.runtime.jit_cache_hook = hook
        try:
            yield jobs
        finally:
            knobs.runtime.jit_cache_hook = before


def _name(kernel: Any, constants: dict) -> str:
    """Operation, kernel where an operation has several, and the sizes of SHOWN."""
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    if not hasattr(torch.ops.csd, name):
        name = f"{kernel.module.split('.')[2]} {name}"
    named = {kernel.arg_names[path[0]]: value for path, value in constants.items()}
    sizes = [f"{size}={named[size]}" for size in SHOWN if size in named and "ORDERS" not in named]
    if "ORDERS" in named:
        sizes = [f"O={len(named['ORDERS'])}"] + ["resumed"] * named.get("RESUMED", False)
    return " ".join([name, *sizes])


def jobs_of(target: str, shape: Shape, dtype: str) -> list[CompileJob]:
    """Record the launches of a model's step on the target, each job once."""
    found: dict[tuple, CompileJob] = {}
    for label, launch in launches(shape, dtype):
        with recording(target) as jobs:
            launch()
        for job in jobs:
            name = f"{job.name}, {label}" if label else job.name
            job = replace(job, name=name)
            found.setdefault(job.key, job)
    return list(found.values())
