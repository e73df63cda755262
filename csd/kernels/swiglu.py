"""Gated activation of the feed-forward layer.

    y = silu(gate) * up,    silu(x) = x / (1 + exp(-x))

gate and up are the two halves of one row, as one matrix product gives them. (Shazeer, "GLU
variants improve transformer", 2020.)
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from csd.kernels.aot import Job, Shape

BLOCK = 1024


def swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [.., 2F]. Returns [.., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [R, 2 * WIDTH]
    y_ptr,  # [R, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + offs, mask=mask, other=0.0).to(WIDE)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + WIDTH + offs, mask=mask, other=0.0).to(WIDE)
    # exp overflows to infinity for very negative gates, and the quotient is 0 as it should be
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * WIDTH + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """One launch; gate_up must be contiguous."""
    width = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = y.numel() // width
    _swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_up_ptr=gate_up,
        y_ptr=y,
        WIDTH=width,
        BLOCK=BLOCK,
        WIDE=tl.float64 if y.dtype == torch.float64 else tl.float32,
        num_warps=4,
    )
    return y


@torch.library.custom_op("csd::swiglu", mutates_args=(), device_types="cpu")
def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return swiglu_ref(gate_up)


@_swiglu.register_kernel("cuda")
def _(gate_up):
    with torch.cuda.device_of(gate_up):
        return swiglu_triton(gate_up)


@_swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [.., 2F], contiguous. Returns [.., F]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must be [.., 2F], got {tuple(gate_up.shape)}")
    if not gate_up.is_contiguous():
        raise ValueError(f"gate_up must be contiguous, got strides {gate_up.stride()}")
    return _swiglu(gate_up)


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    return [
        Job(
            name="swiglu",
            kernel=_swiglu_kernel,
            args={
                "gate_up_ptr": f"*{dtype}:16",
                "y_ptr": f"*{dtype}:16",
                "WIDTH": shape.intermediate,
                "BLOCK": BLOCK,
                "WIDE": tl.float32,
            },
        )
    ]
