"""The kernels of a step at the sections' shapes, compiled by all cores before anything else.

Triton alone compiles at the first launch, one kernel after another.
"""

import os

import torch
from triton import knobs

from bench.gpu.aot import SHAPES, Shape, problems
from bench.gpu.aot import run as compile_all
from bench.gpu.aot.run import OutOfTime
from bench.gpu.section import Section
from bench.lib import shapes


def run(section: Section) -> None:
    """A row a kernel: the figures of `make aot`, by the compiler of this machine."""
    if not section.cuda:
        section.skip("kernels are compiled for a GPU: `make aot` does so without one")
        return
    # binaries are a chip's own: none of another's is found in the cache
    target = chip()
    section.facts["target"] = target
    cores = len(os.sched_getaffinity(0))
    # in float32 the model whose generations `parity` compares, which comes next
    tiny = Shape.of("tiny", shapes.SHAPES["tiny"])
    tasks = [(target, "fp32", tiny)] + [(target, "bf16", shape) for shape in SHAPES[:2]]
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
    """The device's name among compilers' targets: sm_90, sm_120, gfx942, .."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{10 * major + minor}"
