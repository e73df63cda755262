"""Gated activation of the feed-forward layer.

    y = silu(gate) * up,    silu(x) = x / (1 + exp(-x))
    y = gelu(gate) * up,    gelu(x) = x / (1 + exp(-x (a + b x^2))),   a = sqrt(8 / pi)
                                    = x (1 + tanh(x (a + b x^2) / 2)) / 2,   b = 0.044715 a

gate and up are the two halves of one row, as computed by one matrix product, or two tensors. Both
forms are differentiable, with a backward pass in plain PyTorch. GELU is its tanh approximation.
(Shazeer, "GLU variants improve transformer", 2020; Hendrycks and Gimpel, "Gaussian error linear
units", 2016.)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from csd.kernels.common.operator import operator
from csd.kernels.layers.constants import CUBIC, LINEAR
from csd.state.record import check_tensor

BLOCK = 1024


def swiglu_ref(gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """gate_up: [.., 2F]. Returns [.., F]; gelu: apply GELU to gate in place of SiLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.requires_grad or gate.device.type != "cpu":
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    # on a CPU, `silu` rounds the elements after its last full vector differently: a result would
    # depend on the element's index. `exp` has no such difference
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    z = wide * (LINEAR + CUBIC * wide * wide) if gelu else wide
    active = wide / z.neg().exp_().add_(1)
    return active.to(gate.dtype).mul_(up)


def silu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up: [.., F]. Returns [.., F]."""
    return F.silu(gate) * up


def swiglu_triton(gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """One launch; gate_up must be contiguous."""
    width = gate_up.shape[-1] // 2
    return _launch(gate_up, None, gate_up.new_empty(*gate_up.shape[:-1], width), gelu)


def silu_mul_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """One launch; both must be contiguous."""
    return _launch(gate, up, torch.empty_like(gate))


def _launch(gate, up, y, gelu=False) -> torch.Tensor:
    import triton
    import triton.language as tl

    from csd.kernels.layers.triton.elementwise import swiglu_kernel

    width = y.shape[-1]
    if not y.numel():
        return y
    rows = y.numel() // width
    swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_ptr=gate,
        up_ptr=up,
        y_ptr=y,
        ROW=gate.shape[-1],
        WIDTH=width,
        BLOCK=BLOCK,
        WIDE=tl.float64 if y.dtype == torch.float64 else tl.float32,
        GELU=gelu,
        A=LINEAR,
        B=CUBIC,
        num_warps=4,
    )
    return y


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.layers.cpu import elementwise

    return elementwise.reads_swiglu, elementwise.swiglu


_swiglu = operator(
    "swiglu",
    swiglu_ref,
    swiglu_triton,
    loop=_loop,
    fake=lambda gate_up, gelu=False: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
_silu_mul = operator(
    "silu_mul", silu_mul_ref, silu_mul_triton, fake=lambda gate, up: torch.empty_like(gate)
)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return _gradients(grad, *ctx.saved_tensors, False)


def _gradients(grad, gate, up, gelu) -> tuple[torch.Tensor, torch.Tensor]:
    aten = torch.ops.aten
    if gelu:
        of_gate = aten.gelu_backward(grad * up, gate, approximate="tanh")
        return of_gate, grad * F.gelu(gate, approximate="tanh")
    return aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def _save_halves(ctx, inputs, output):
    gate_up, ctx.gelu = inputs
    ctx.save_for_backward(gate_up)


def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Gradient of gate_up [.., 2F] for that of the result, grad [.., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat(_gradients(grad, gate, up, gelu), dim=-1)


def _halves_backward(ctx, grad):
    return swiglu_backward(grad, ctx.saved_tensors[0], ctx.gelu), None


_silu_mul.register_autograd(_backward, setup_context=_save)
_swiglu.register_autograd(_halves_backward, setup_context=_save_halves)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up: [.., F], contiguous, of one dtype. Returns silu(gate) * up, [.., F]."""
    if gate.dim() < 1:
        raise ValueError("gate must have shape [.., F], got a tensor without dimensions")
    check_tensor("gate", gate, gate.shape, None, gate.device)
    check_tensor("up", up, gate.shape, gate.dtype, gate.device)
    return _silu_mul(gate, up)


def swiglu(gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """gate_up: [.., 2F], contiguous. Returns [.., F]; gelu: apply GELU to gate, not SiLU."""
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must be [.., 2F], got {tuple(gate_up.shape)}")
    check_tensor("gate_up", gate_up, gate_up.shape, None, gate_up.device)
    return _swiglu(gate_up, gelu)
