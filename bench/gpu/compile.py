"""Every kernel of the later sections, compiled by all cores before anything else.

Triton compiles at the first launch, one kernel after another, half a second to three seconds each.
"""

import os

from triton import knobs

from bench.aot import problems
from bench.aot import run as compile_all
from bench.gpu.section import Section
from csd.kernels.aot import SHAPES, Shape, target_of
from csd.models import shapes


def run(section: Section) -> None:
    """A row a kernel: what `make aot` says of it, by the compiler of this machine."""
    if not section.cuda:
        section.skip("kernels are compiled for a GPU: `make aot` does so without one")
        return
    target = target_of(section.device)
    tasks = [(target, "bf16", shape) for shape in SHAPES[:2]] + [(target, "fp32", tiny())]
    rows = compile_all(tasks, os.cpu_count() or 1, cache=knobs.cache.dir)
    for row in rows:
        section.add(**row)
    wrong = [f"{row['kernel']}: {'; '.join(problems(row))}" for row in rows if problems(row)]
    if wrong:
        raise RuntimeError(f"not compiled as it should be: {', '.join(wrong)}")


def tiny() -> Shape:
    """The model whose generations `parity` compares."""
    c = shapes.SHAPES["tiny"]
    sizes = c.heads, c.kv_heads, c.head_dim, c.hidden, c.intermediate, c.layers, c.vocab
    return Shape("tiny", *sizes)
