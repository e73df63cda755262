"""Operations of a decoder whose forward is a backend's and whose gradient is plain PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.nn.functional import embedding

from csd.kernels.layers.rms_norm import rms_norm_backward
from csd.kernels.layers.swiglu import swiglu_backward
from csd.kernels.ops import Ops


class Laid(NamedTuple):
    """A matrix in the layout that a product reads, and the plain one that has its gradient."""

    laid: torch.Tensor
    plain: torch.Tensor  # [out, in]

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype


class _Made(Function):
    @staticmethod
    def forward(
        ctx: Any, whole: tuple[torch.Tensor], divide: Callable, *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.divide = divide
        return whole[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return None, None, *ctx.divide(grads[0])


def made_of(parts: Sequence[torch.Tensor], whole: torch.Tensor, divide: Callable) -> torch.Tensor:
    """`whole`, made of the parameters `parts`, to which its gradient goes.

    divide: the gradient of `whole` -> those of the parts.
    """
    if not any(part.requires_grad for part in parts):
        return whole
    # autograd records tensors alone as inputs, not the ones in a tuple
    out: torch.Tensor = _Made.apply((whole,), divide, *parts)
    return out


def joined(whole: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """`whole`, of which `parts` are consecutive views."""
    rows = [part.shape[0] for part in parts]
    return made_of(parts, whole, lambda grad: grad.split(rows))


def without_row(weight: torch.Tensor, index: int) -> torch.Tensor:
    """A weight whose row `index` has no gradient, as that of a padding token in an embedding."""

    def divide(grad: torch.Tensor) -> list[torch.Tensor]:
        grad = grad.clone()
        grad[index] = 0
        return [grad]

    return made_of([weight], weight, divide)


class _LinearGradient(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        x, weight, bias, laid, product = inputs
        ctx.save_for_backward(x, weight)
        out: torch.Tensor = product(x, weight if laid is None else laid, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        products = grad @ weight if of_x else None, grad.mT @ x if of_weight else None
        return *products, grad.sum(0) if of_bias else None, None, None


# rows of adapters' products at a time
LORA_ROWS = 512


class _AddLora(Function):
    """y + B (A x) of each stack, few rows at a time, since the sums are in a wider dtype.

    add: the engine's function of rows of x and y. plain: A [R, in] and B [out, R] of each stack.
    """

    @staticmethod
    def forward(
        ctx: Any, add: Callable, x: torch.Tensor, y: torch.Tensor, *plain: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *plain)
        out = torch.empty_like(y)
        for part, rows, base in zip(*(t.split(LORA_ROWS) for t in (out, x, y)), strict=True):
            part.copy_(add(rows, base.clone()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (x, *plain), (grad,) = ctx.saved_tensors, grads
        wide = torch.promote_types(plain[0].dtype, torch.float32)
        of_x, weights = torch.empty_like(x), [weight.to(wide) for weight in plain]
        sums = [torch.zeros_like(weight) for weight in weights]
        pairs = list(zip(weights[::2], weights[1::2], sums[::2], sums[1::2], strict=True))
        for part, *rows in zip(*(t.split(LORA_ROWS) for t in (of_x, x, grad)), strict=True):
            h, g = (t.to(wide) for t in rows)
            total = torch.zeros_like(h)
            for a, b, of_a, of_b in pairs:
                inner = g @ b
                total.addmm_(inner, a)
                of_a.addmm_(inner.mT, h)
                of_b.addmm_(g.mT, h @ a.mT)
            part.copy_(total)
        return None, of_x, grad, *(t.to(w.dtype) for t, w in zip(sums, plain, strict=True))


def add_lora(add: Callable, x: torch.Tensor, y: torch.Tensor, stacks: list) -> torch.Tensor:
    """y [M, out] with the adapters' results for x [M, in] added; differentiable.

    add: the engine's function of x and y, which may write y. stacks: of `Laid` matrices.
    """
    plain = [matrix.plain for stack in stacks for matrix in stack]
    out: torch.Tensor = _AddLora.apply(add, x, y, *plain) if plain else y
    return out


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        x, weight, residual, eps, plus_one, norm = inputs
        y, r = norm(x, weight, eps, residual, plus_one=plus_one)
        ctx.save_for_backward(r, weight)
        ctx.eps, ctx.plus_one = eps, plus_one
        return y if residual is None else (y, r)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *sums: torch.Tensor) -> tuple:
        r, weight = ctx.saved_tensors
        of_r, of_weight = rms_norm_backward(grad, r, weight, ctx.eps, ctx.plus_one)
        for of_sum in sums:
            of_r = of_r + of_sum
        return of_r, of_weight, of_r if sums else None, None, None, None


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, position, cos, sin, rotary = inputs
        node_k, node_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v)
        )
        q = rotary(q, k, v, position, cos, sin, node_k, node_v)
        ctx.tables = [x.index_select(0, position)[:, None] for x in (cos, sin)]
        return q, node_k, node_v

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        of_q, of_k, of_v = grads
        return *(_rotated_back(x, *ctx.tables) for x in (of_q, of_k)), of_v, None, None, None, None


def _rotated_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Gradient of x for that of rot(x), grad [M, H, D], of `csd.kernels.layers.rotary`."""
    R, wide = cos.shape[-1], torch.promote_types(grad.dtype, torch.float32)
    part, cos, sin = (x.to(wide) for x in (grad[..., :R], cos, sin))
    low, high = (part * sin).chunk(2, dim=-1)
    part = (part * cos + torch.cat((high, -low), dim=-1)).to(grad.dtype)
    return part if grad.shape[-1] == R else torch.cat((part, grad[..., R:]), -1)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, gelu: bool, swiglu: Callable) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        out: torch.Tensor = swiglu(gate_up, gelu)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return swiglu_backward(grads[0], ctx.saved_tensors[0], ctx.gelu), None, None


class LayerBuffer:
    """Keys and values of the layer that is computed, in place of a step's buffers."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def __getitem__(self, layer: int) -> "LayerBuffer":
        return self

    def take(self) -> torch.Tensor:
        """The tensor, which is then no longer held."""
        tensor, self.value = self.value, None
        assert tensor is not None
        return tensor


class GradientOps:
    """The operations that `csd.models.fused.decoder.Decoder.layer` calls, differentiable."""

    def __init__(self, ops: Ops):
        self._ops = ops

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        plus_one: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rows is not None:
            x = embedding(rows, x)
        out = _Norm.apply(x, weight, residual, eps, plus_one, self._ops.rms_norm)
        return (out, x) if residual is None else out

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        node_k: LayerBuffer,
        node_v: LayerBuffer,
    ) -> torch.Tensor:
        rotated, node_k.value, node_v.value = _Rotary.apply(
            q, k, v, position, cos, sin, self._ops.rotary
        )
        return rotated

    def swiglu(self, gate_up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
        out: torch.Tensor = _Gated.apply(gate_up, gelu, self._ops.swiglu)
        return out


def linear(product: Callable) -> Callable:
    """`product` of x [M, in] and a weight, a tensor [out, in] or `Laid`; differentiable."""

    def call(
        x: torch.Tensor, weight: torch.Tensor | Laid, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        laid, plain = (weight.laid, weight.plain) if isinstance(weight, Laid) else (None, weight)
        out: torch.Tensor = _LinearGradient.apply(x, plain, bias, laid, product)
        return out

    return call
