"""The compilation jobs of a target, taken from launches: nothing is compiled, run or declared.

A launch goes Triton's own way up to the compiler, for a driver without a device that names the
target. What Triton would compile there is recorded: types, alignment, constants and warps are
those that the JIT finds, so a launch on such a GPU finds the binary of a job in Triton's cache. It
needs a process in which triton was imported without TRITON_INTERPRET, and in which no other thread
launches kernels meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from csd.kernels.common.gpu import Chip, launching_for


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """backend, arch, warp: what Triton calls the GPU; chip: what kernels choose tiles by."""

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


def named(target: str) -> CompileTarget:
    """A chip by its compiler's name: sm_ and the compute capability, or gfx and AMD's number."""
    if target.startswith("gfx"):
        return CompileTarget("hip", target, 64, Chip.of("gfx942"))
    return CompileTarget("cuda", int(target.removeprefix("sm_")), 32, Chip.of(target))


# operations of the kernels in a file or folder of `csd.kernels` that has another name
OPERATIONS = {
    "attention.packed.triton.backward": "packed_attention_backward",
    "attention.triton.exact": "exact_attention",
    "draft.paper.triton": "suffix_match",
    "draft.triton": "draft_tree",
    "layers.triton.linear": "row_linear",
    "states.triton": "tree_delta_rule",
    "table.triton": "graph_insert",
    "verify.triton": "verify",
}
# constants that a job's name shows, where its kernel has them
SHOWN = ("F", "D", "N", "BLOCK_T", "PARTS", "MOVED", "SOLVE")


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
        names = ["num_warps", "num_stages", "enable_fp_fusion"]
        # not every backend has it
        names += ["launch_pdl"] if self.launch_pdl else []
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> tuple:
        """Equal for jobs, and launches, that share a binary."""
        return self.source.hash(), self.num_warps, self.num_stages, self.enable_fp_fusion


@contextmanager
def recording(target: CompileTarget) -> Iterator[list[CompileJob]]:
    """A list that receives what kernels launched within, on tensors of any device, compile from."""
    jobs: list[CompileJob] = []

    def hook(*, fn: Any, compile: dict, **_: Any) -> bool:
        kernel, constants, (attrs,) = fn.jit_function, compile["constants"], compile["configs"]
        source = ASTSource(kernel, compile["signature"], constants, attrs)
        names = "num_warps", "num_stages", "enable_fp_fusion"
        # `csd.kernels.common.gpu` sets both
        named = _named(kernel, constants)
        pdl = bool(named.get("PDL")) and "AHEAD" in named
        options = (*(compile[name] for name in names), pdl)
        jobs.append(CompileJob(_name(kernel, named), source, *options))
        # as if it were compiled: the launch ends here
        return True

    without_device: Any = SimpleNamespace(
        get_current_target=lambda: target.gpu,
        # Triton caches a target's properties by the device
        get_current_device=lambda: str(target),
        get_current_stream=lambda device=None: 0,
    )
    before = driver._active, knobs.runtime.jit_cache_hook
    driver._active, knobs.runtime.jit_cache_hook = without_device, hook
    try:
        with launching_for(target.chip):
            yield jobs
    finally:
        driver._active, knobs.runtime.jit_cache_hook = before


def _named(kernel: Any, constants: dict) -> dict[str, Any]:
    """Constants by name, those of a NamedTuple by its fields' names."""
    named = {kernel.arg_names[path[0]]: value for path, value in constants.items()}
    for value in tuple(named.values()):
        named |= value._asdict() if hasattr(value, "_asdict") else {}
    return named


def _name(kernel: Any, named: dict[str, Any]) -> str:
    """Operation, kernel where an operation has several, and the sizes of SHOWN."""
    name = kernel.__name__.removesuffix("_kernel")
    if not hasattr(torch.ops.csd, name):
        file = kernel.module.removeprefix("csd.kernels.")
        folder, _, last = file.rpartition(".")
        name = f"{OPERATIONS.get(file) or OPERATIONS.get(folder) or last} {name}"
    if orders := named.get("ORDERS"):
        return f"{name} O={len(orders)}{' resumed' * named.get('RESUMED', False)}"
    sizes = [f"{size}={named[size]}" for size in SHOWN if named.get(size) not in (None, ())]
    return " ".join([name, *sizes])
