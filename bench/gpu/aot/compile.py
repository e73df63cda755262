"""Compilation of one job by Triton's whole pipeline, and the resource use of the binary."""

import os
import re
import subprocess
import tempfile
import time
from typing import Any

from bench.gpu.aot.record import TARGETS
from csd.kernels.common.compile_jobs import CompileJob, named


def compile_job(job: CompileJob, target: str, disassembled: bool = True) -> dict:
    """Registers, stack, spills, instructions, shared memory and its limit, and seconds.

    disassembled: if False, the counts from an NVIDIA GPU's machine code are "-": disassembling a
    small kernel takes as long as compiling it.
    """
    import triton

    t = named(target)
    start = time.perf_counter()
    kernel = triton.compile(job.source, target=t.gpu, options=job.options)
    seconds = time.perf_counter() - start
    cuda = t.backend == "cuda"
    usage = _cuda_usage(kernel, disassembled) if cuda else _hip_usage(kernel)
    shared = kernel.metadata.shared
    return {
        "kernel": job.name,
        "target": target,
        "warps": job.num_warps,
        "stages": job.num_stages,
        **usage,
        "shared": shared,
        "limit": t.shared,
        "at once": at_once(job.num_warps, usage["registers"], shared, t.shared)
        if cuda and target in TARGETS
        else None,
        "seconds": round(seconds, 2),
    }


def at_once(warps: int, registers: int, shared: int, limit: int) -> int:
    """Programs that a multiprocessor runs at once.

    It has 65,536 registers, allocated to warps in units of 256; at most 64 warps and 32 programs,
    or, with less than 100 KiB of shared memory, at least 48 and 16; and 1 KiB more shared memory
    than a program may use (`limit`), of which each program takes 1 KiB. (CUDA C++ Programming
    Guide, "Compute Capabilities".)
    """
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
    most_warps, most_programs = (64, 32) if limit > 100 * 1024 else (48, 16)
    return min(by_registers, most_warps // warps, most_programs, (limit + 1024) // (shared + 1024))


def _cuda_usage(kernel: Any, disassembled: bool) -> dict:
    from triton.backends import nvidia

    tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass = ["--dump-sass"] * disassembled
        run = [tool, "--dump-resource-usage", *sass, file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout

    def number(field: str) -> int:
        match = re.search(rf"{field}:(\d+)", text)
        if match is None:
            raise RuntimeError(f"cuobjdump does not print {field}: {text[:200]}")
        return int(match[1])

    ptx = kernel.asm["ptx"]
    kinds = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma"}
    mma = next((kind for words, kind in kinds.items() if words in ptx), "-")
    return {
        "registers": number("REG"),
        "stack": number("STACK"),
        **(_counted(text) if disassembled else dict.fromkeys(COUNTED, "-")),
        "mma": mma,
        "async": "cp.async" in ptx,
        **_dependent(ptx),
    }


COUNTED = "spills", "instructions", "mma loops", "wide", "narrow"


def _counted(sass: str) -> dict:
    """Counts named in COUNTED, from a disassembly."""
    counts = (
        # STL stores a register to the stack: only a spill does, as kernels have no local arrays
        len(re.findall(r"\bSTL\b", sass)),
        # instructions without the NOP padding after the last one
        len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?!NOP\b)\S", sass, re.M)),
        mma_loops(sass),
        # loads from global memory of 16 bytes per thread, and of one or two
        len(re.findall(r"\bLDG(?:STS)?\.E\.(?:\w+\.)*128\b", sass)),
        len(re.findall(r"\bLDG\.E\.(?:\w+\.)*[US](?:8|16)\b", sass)),
    )
    return dict(zip(COUNTED, counts, strict=True))


def mma_loops(sass: str) -> list[int]:
    """Instruction counts of the innermost loops with matrix products, in the order of the code."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(\S.*?);", sass, re.M)
    addressed = [(int(at, 16), instruction) for at, instruction in lines]
    loops = []
    for end, instruction in addressed:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        begin = int(target[1], 16) if target else end
        if begin >= end:
            continue
        within = [text for at, text in addressed if begin <= at <= end]
        if any("MMA" in text for text in within):
            loops.append((begin, end, len(within)))
    return [
        n
        for a, b, n in loops
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d, _ in loops)
    ]


def _dependent(ptx: str) -> dict:
    """Count prefetches and other accesses before a kernel's wait for its predecessor."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return {"waits": False}
    early = re.findall(r"\b(?:ld|st|atom|red|cp\.async\.\w+\.shared)\.global\b", before)
    return {"waits": True, "prefetches": before.count("prefetch.global"), "early": len(early)}


def _hip_usage(kernel: Any) -> dict:
    text = kernel.asm["amdgcn"]

    def number(field: str) -> int:
        match = re.search(rf"\.{field}:\s+(\d+)", text)
        return int(match[1]) if match else 0

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        "instructions": len(re.findall(r"^\t(?:v|s|ds|global|buffer|flat|scratch)_", text, re.M)),
        "mma": "mfma" if "v_mfma" in text else "-",
        "mma loops": [],
        "async": False,
        "waits": False,
        "wide": len(re.findall(r"\b(?:global|buffer)_load_(?:dwordx4|b128)\b", text)),
        "narrow": len(re.findall(r"\b(?:global|buffer)_load_[us](?:byte|short)", text)),
    }
