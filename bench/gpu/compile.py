"""The kernels of a step at the sections' shapes, compiled by all cores before anything else.

Triton alone compiles at the first launch, one kernel after another.
"""

import os
import subprocess

import torch
from triton import knobs

from bench.aot import problems
from bench.aot import run as compile_all
from bench.gpu.section import Section
from csd.kernels.aot import SHAPES, Shape
from csd.models import shapes


def run(section: Section) -> None:
    """A row a kernel: what `make aot` says of it, by the compiler of this machine."""
    if not section.cuda:
        section.skip("kernels are compiled for a GPU: `make aot` does so without one")
        return
    # tiles are shared by more chips, binaries are not
    target = {(9, 0): "sm_90", (8, 0): "sm_80"}.get(torch.cuda.get_device_capability())
    if target is None:
        section.skip("kernels are compiled ahead for sm_90 and sm_80, this is another chip")
        return
    cores = len(os.sched_getaffinity(0))
    for dtype, shape in [("bf16", shape) for shape in SHAPES[:2]] + [("fp32", tiny())]:
        task, left = (target, dtype, shape), max(section.left, 1)
        try:
            rows = compile_all([task], cores, cache=knobs.cache.dir, timeout=left)
        except subprocess.TimeoutExpired:
            section.skip(f"{shape.name}: no time; what is compiled is kept")
            break
        for row in rows:
            section.add(**row)
    wrong = [f"{r['kernel']}: {'; '.join(problems(r))}" for r in section.rows if problems(r)]
    if wrong:
        raise RuntimeError(f"not compiled as it should be: {', '.join(wrong)}")


def tiny() -> Shape:
    """The model whose generations `parity` compares."""
    c = shapes.SHAPES["tiny"]
    sizes = c.heads, c.kv_heads, c.head_dim, c.hidden, c.intermediate, c.layers, c.vocab
    return Shape("tiny", *sizes)
