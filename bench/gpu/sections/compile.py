"""Compilation of a step's kernels at the sections' shapes, on all cores, before other sections.

Otherwise Triton compiles at first launches, one kernel after another.
"""

import os
import sys
from collections.abc import Collection

import torch
from triton import knobs

from bench.gpu.aot import Shape, problems
from bench.gpu.aot import run as compile_all
from bench.gpu.aot.run import OutOfTime
from bench.gpu.lib import workload
from bench.gpu.lib.section import Section
from bench.lib.shapes import SHAPES as SIZES


def run(section: Section) -> None:
    """Add one row per kernel: the figures of `make aot`, from this machine's compiler."""
    if not section.cuda:
        section.skip("kernels are compiled for a GPU: `make aot` does so without one")
        return
    # the cache distinguishes binaries by chip
    target = chip()
    section.facts["target"] = target
    cores = len(os.sched_getaffinity(0))
    tasks = tasks_of(
        target, workload.shapes(section), parity=section.call != 2, dtype=section.dtype
    )
    try:
        rows = compile_all(tasks, cores, cache=knobs.cache.dir, timeout=max(section.left, 1))
    except OutOfTime as error:
        section.cut_off(f"{error}; what is compiled is kept")
        rows = error.rows
    for row in rows:
        section.add(**row)
    wrong = [f"{r['kernel']}: {'; '.join(problems(r))}" for r in section.rows if problems(r)]
    if wrong:
        raise RuntimeError(f"not compiled as it should be: {', '.join(wrong)}")


def tasks_of(
    target: str, names: Collection[str], parity: bool, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, str, Shape]]:
    """Compilations for shapes by name, begun with that of `parity`'s float32 model if asked."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    tiny = [(target, "fp32", Shape.of("tiny", SIZES["tiny"]))] if parity else []
    return tiny + [(target, short, Shape.of(name, SIZES[name])) for name in names]


def chip() -> str:
    """Compiler target of the device: sm_90, sm_120, gfx942, .."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{10 * major + minor}"


def main(target: str) -> int:
    """Compile all for a chip that need not be there, into Triton's cache; returns the exit code."""
    tasks = tasks_of(target, workload.LARGE, parity=True)
    rows = compile_all(tasks, len(os.sched_getaffinity(0)), cache=knobs.cache.dir)
    wrong = [row for row in rows if problems(row)]
    for row in wrong:
        print(f"{row['kernel']}: {'; '.join(problems(row))}", file=sys.stderr)
    right = f"{len(rows) - len(wrong)} of {len(rows)}"
    print(f"{right} kernels compiled for {target}: {knobs.cache.dir}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
