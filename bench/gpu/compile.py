"""Compilation of a step's kernels at the sections' shapes, on all cores, before other sections.

Otherwise Triton compiles at first launches, one kernel after another.
"""

import os

import torch
from triton import knobs

from bench.gpu import workload
from bench.gpu.aot import SHAPES, Shape, problems
from bench.gpu.aot import run as compile_all
from bench.gpu.aot.run import OutOfTime
from bench.gpu.section import Section
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
    # float32 for the model whose generations the next section, `parity`, compares
    tiny, named = Shape.of("tiny", SIZES["tiny"]), workload.shapes(section)
    tasks = [(target, "fp32", tiny)] if section.call != 2 else []
    tasks += [(target, "bf16", shape) for shape in SHAPES if shape.name in named]
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


def chip() -> str:
    """Compiler target of the device: sm_90, sm_120, gfx942, .."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{10 * major + minor}"
