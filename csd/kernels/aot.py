"""Kernels compiled ahead of time, for GPUs that are not there.

A file of this package that holds kernels has a function

    aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]

with the specialisations a model of that shape runs on that target: "sm_90", "sm_80" or "gfx942".
`compile_job` runs Triton's whole pipeline down to the binary and reads off what it uses. It needs
a process in which triton was imported without TRITON_INTERPRET.
"""

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from csd.graph.table import GraphConfig
from csd.models.config import ModelConfig

# graphs that are compiled ahead, and timed, beside the default
SHALLOW = GraphConfig(orders=(1, 2, 3, 4), max_depth=8)
DEEP = GraphConfig(orders=(1, 2, 3, 4, 5, 6, 7, 8), successors=8, max_depth=16)


@dataclass(frozen=True, slots=True)
class Target:
    """backend, arch, warp: what Triton calls the GPU; shared: bytes a program may use of it."""

    backend: str
    arch: int | str
    warp: int
    shared: int


TARGETS = {
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that kernels are specialised on."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, name: str, c: ModelConfig) -> "Shape":
        sizes = c.heads, c.kv_heads, c.head_dim, c.hidden, c.intermediate, c.layers, c.vocab
        return cls(name, *sizes)


@dataclass(frozen=True, slots=True)
class Job:
    """One specialisation of a kernel.

    args: a value for every parameter. That of a constexpr is the value itself, that of an absent
    pointer None, that of any other its type as Triton writes it ("*bf16", "i32", "fp32"). ":16"
    behind a type says divisible by 16: the JIT finds that out by itself, and whether loads are
    vectors depends on it.
    """

    name: str
    kernel: Any
    args: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@cache
def target_of(device: torch.device) -> str:
    """The target whose tiles a device runs; CPU tensors are interpreted and take sm_90's."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    major, _ = capability = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return "sm_90"
    # other chips have less shared memory than either, and tiles made for 64 KiB fit them all
    return "sm_80" if capability in ((8, 0), (8, 7)) else "gfx942"


@cache
def programs_of(device: torch.device) -> int:
    """Programs of a fixed grid: two for each multiprocessor; a few where they are interpreted."""
    if device.type != "cuda":
        return 4
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def modules() -> list:
    """The modules of this package that declare jobs."""
    import csd.kernels

    found = [
        importlib.import_module(f"csd.kernels.{m.name}")
        for m in pkgutil.iter_modules(csd.kernels.__path__)
    ]
    return [m for m in found if hasattr(m, "aot_jobs")]


def all_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    """Jobs of every kernel, under names that are unique over shapes."""
    return [job for m in modules() for job in m.aot_jobs(target, shape, dtype)]


def source_of(job: Job) -> tuple[Any, dict]:
    """The source and options that `triton.compile` takes, equal to those of the job's launches.

    Their hash is then the same, so that a launch finds what was compiled ahead of time in Triton's
    cache.
    """
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list] = {}
    for i, param in enumerate(job.kernel.params):
        value = job.args[param.name]
        if param.is_constexpr or value is None:
            signature[param.name] = "constexpr"
            constants[param.name] = value
            attrs[(i,)] = []
            continue
        signature[param.name], _, aligned = value.partition(":")
        if aligned and param.do_not_specialize:
            raise ValueError(f"{job.name}: {param.name} is not specialised on, got {value!r}")
        # a launch lists every integer and pointer that it looked at, and the hash is over the list
        if aligned:
            attrs[(i,)] = [["tt.divisibility", int(aligned)]]
        elif not param.do_not_specialize and signature[param.name][:2] not in ("fp", "bf"):
            attrs[(i,)] = []
    unknown = job.args.keys() - signature.keys()
    if unknown:
        raise ValueError(f"{job.name} gives arguments the kernel does not have: {sorted(unknown)}")
    source = ASTSource(fn=job.kernel, signature=signature, constexprs=constants, attrs=attrs)
    return source, {"num_warps": job.num_warps, "num_stages": job.num_stages}


def compile_job(job: Job, target: str) -> dict:
    """Compiles; returns registers, stack, spills, shared memory and its limit, and seconds."""
    import triton
    from triton.backends.compiler import GPUTarget

    t = TARGETS[target]
    source, options = source_of(job)
    start = time.perf_counter()
    kernel = triton.compile(source, target=GPUTarget(t.backend, t.arch, t.warp), options=options)
    seconds = time.perf_counter() - start
    usage = _cuda_usage(kernel) if t.backend == "cuda" else _hip_usage(kernel)
    return {
        "kernel": job.name,
        "target": target,
        "warps": job.num_warps,
        "stages": job.num_stages,
        **usage,
        "shared": kernel.metadata.shared,
        "limit": t.shared,
        "seconds": round(seconds, 2),
    }


def _cuda_usage(kernel: Any) -> dict:
    from triton.backends import nvidia

    tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = [tool, "--dump-resource-usage", "--dump-sass", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout

    def number(field: str) -> int:
        found = re.search(rf"{field}:(\d+)", text)
        if found is None:
            raise RuntimeError(f"cuobjdump does not say {field}: {text[:200]}")
        return int(found[1])

    # STL stores a register to the stack: only a spill does, as kernels have no local arrays
    spills = len(re.findall(r"\bSTL\b", text))
    ptx = kernel.asm["ptx"]
    mma = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "-"
    return {
        "registers": number("REG"),
        "stack": number("STACK"),
        "spills": spills,
        "mma": mma,
        "async": "cp.async" in ptx,
        # loads from global memory of 16 bytes a thread, and of one or two
        "wide": len(re.findall(r"\bLDG(?:STS)?\.E\.(?:\w+\.)*128\b", text)),
        "narrow": len(re.findall(r"\bLDG\.E\.(?:\w+\.)*[US](?:8|16)\b", text)),
    }


def _hip_usage(kernel: Any) -> dict:
    text = kernel.asm["amdgcn"]

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        "mma": "mfma" if "v_mfma" in text else "-",
        "async": False,
        "wide": len(re.findall(r"\b(?:global|buffer)_load_(?:dwordx4|b128)\b", text)),
        "narrow": len(re.findall(r"\b(?:global|buffer)_load_[us](?:byte|short)", text)),
    }
