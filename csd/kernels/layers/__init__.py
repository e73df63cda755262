"""Modules of a decoder layer on csd's kernels, for training and decoding your own model.

Their parameters have the names and shapes of transformers' Llama, so its weights can be loaded.
"""

import torch
from torch import nn

from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotate
from csd.kernels.layers.swiglu import silu_mul


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, which has `size` elements.

    The statistics are computed in float32 for any dtype.
    """

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., size], of the weight's dtype. Returns y with the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)[0]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the feed-forward layer of Llama and Qwen.

    size: features of input and output; inner: features of gate and up.
    """

    def __init__(self, size: int, inner: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias)
        self.up_proj = nn.Linear(size, inner, bias)
        self.down_proj = nn.Linear(inner, size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., size]. Returns the same shape."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys, in the half-split form of Llama.

    head_dim: D, even. base: base of the frequencies base^(-2 j / D), j < D / 2.
    """

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        self.head_dim, self.base = head_dim, base

    def forward(
        self,
        q: torch.Tensor,  # [.., H, D]
        k: torch.Tensor,  # [.., K, D]
        position: torch.Tensor,  # [..], position of each token in its text
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotated q and k, of their shapes and dtype."""
        # no buffer: a cast of the module would round it, and angles of thousands need all digits
        exponent = torch.arange(0, self.head_dim, 2, device=position.device) / self.head_dim
        angle = position.reshape(-1, 1).float() * self.base**-exponent
        cos, sin = (x.repeat(1, 2).to(q.dtype) for x in (angle.cos(), angle.sin()))
        rows_q, rows_k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
        turned_q, turned_k = rotate(rows_q, rows_k, cos, sin)
        return turned_q.view(q.shape), turned_k.view(k.shape)
