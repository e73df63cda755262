"""Programmatic dependent launch: a kernel starts while the previous one is still running.

From sm_90 on, a kernel with this launch option starts as soon as every program of its predecessor
has called `launch_next` or ended. It may read the predecessor's results, and write anything, only
after `wait_for_previous`, which waits until all of the results are in memory. Weights do not depend
on the predecessor: `prefetch` requests them before the wait. It moves them to the L2 cache and not
to registers, so weights that an optimiser's kernel has just written are not read too early.
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import driver

LINE = tl.constexpr(128)


@triton.jit
def launch_next():
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    cuda.gdc_wait()


@triton.jit
def prefetch(row_ptr, K, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetches the first AHEAD blocks of BLOCK_K numbers of each row, at most its K numbers.

    row_ptr: [N] pointers to the beginnings of rows of K numbers.
    """
    EACH: tl.constexpr = LINE * 8 // row_ptr.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(AHEAD * BLOCK_K // EACH):
        at = row_ptr + tl.minimum(i * EACH, K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


def dependent_options(kernel: Any) -> dict[str, Any]:
    """Returns the constant PDL and the launch option of a kernel that has this constant."""
    on = has_dependent_launch(kernel)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def has_dependent_launch(kernel: Any) -> bool:
    """True if the current GPU has programmatic dependent launch; False for the interpreter."""
    if not isinstance(kernel, triton.JITFunction):
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90
