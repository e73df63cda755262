"""Programmatic dependent launch: a kernel begins while the one before it ends.

On sm_90 a kernel that is launched so starts as soon as every program of its predecessor has called
`launch_next` or ended. What the predecessor writes may be read, and anything be written, behind
`wait_for_previous` only, which waits until all of it is in memory. Weights depend on no
predecessor: `prefetch` asks for them before the wait. It moves them to the L2 cache and not to
registers, so weights that an optimiser's kernel has just written are not read too early.
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
    """The first AHEAD blocks of BLOCK_K numbers of rows [N] that begin at row_ptr, or what is
    there of them."""
    EACH: tl.constexpr = LINE * 8 // row_ptr.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(AHEAD * BLOCK_K // EACH):
        at = row_ptr + tl.minimum(i * EACH, K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


def dependent_options(kernel: Any) -> dict[str, Any]:
    """PDL and launch options of a kernel that has the constant PDL."""
    on = has_dependent_launch(kernel)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def has_dependent_launch(kernel: Any) -> bool:
    """True if the chip that `kernel` is launched on has it; the interpreter has not."""
    if not isinstance(kernel, triton.JITFunction):
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= 90
