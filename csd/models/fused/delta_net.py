"""Gated delta net of a layer, between the layer's two products, and the sigmoid of gates.

    x = conv(qkv),    o = gated delta rule(x, b, a),    y = norm(o) silu(z)

with q, k, v, z, b and a the parts of one product, strengths sigmoid(b) and decays
exp(-exp(A) softplus(a + bias)). (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, in the
order of casts of transformers' `Qwen3_5GatedDeltaNet`.) A row's bits depend on no other row: on a
CPU, only functions are called that give a number the same bits at every index of a tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch

from csd.kernels.states import DeltaRule
from csd.state.recurrent import StateSize, wide

Parameters = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class DeltaNet:
    """Weights of a gated delta net other than those of its two products."""

    size: StateSize
    conv: torch.Tensor  # [channels, W]
    decay: torch.Tensor  # [H], A
    bias: torch.Tensor  # [H]
    norm: torch.Tensor  # [Dv]
    eps: float

    def __call__(self, ops: Any, product: torch.Tensor, states: Any, number: int) -> torch.Tensor:
        """Returns the gated and normed rows [M, H Dv], the input of the second product.

        product: [M, channels + H Dv + 2 H], the first product. states: the rows' states, from
        `csd.kernels.states`. number: index of the layer among those with a state.
        """
        M, s = product.shape[0], self.size
        Hk, H, Dk, Dv = s.key_heads, s.heads, s.key_dim, s.value_dim
        parts = self.conv.shape[0], H * Dv, H, H
        qkv, z, b, a = product.split(parts, -1)
        x = states.convolve(number, qkv.contiguous(), self.conv, None, True)
        q, k, v = x.split((Hk * Dk, Hk * Dk, H * Dv), -1)
        kind = wide(product.dtype)
        log_decay = -self.decay.to(kind).exp() * softplus(a.to(kind) + self.bias)
        rule = DeltaRule(
            q.reshape(M, Hk, Dk),
            k.reshape(M, Hk, Dk),
            v.reshape(M, H, Dv),
            log_decay,
            sigmoid(b),
            normalize=True,
        )
        out = states.update(number, rule).to(product.dtype)
        out, _ = ops.rms_norm(out, self.norm, self.eps)
        gated = torch.cat((z.to(kind), out.reshape(M, -1).to(kind)), -1)
        return ops.swiglu(gated).to(product.dtype)

    def tensors(self) -> Parameters:
        """The parameters in the order of `delta_parameters`."""
        return self.conv, self.decay, self.bias, self.norm


def delta_parameters(module: Any) -> Parameters:
    """Parameters of a `transformers` gated delta net other than its products' weights."""
    conv = module.conv1d.weight.data[:, 0]
    return conv, module.A_log.data, module.dt_bias.data, module.norm.weight.data


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Logistic function in x's dtype, rounded once."""
    return x.to(wide(x.dtype)).neg().exp_().add_(1).reciprocal_().to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    # linear above 20, as PyTorch's
    return torch.where(x > 20, x, x.clamp(max=20).exp().log1p())
