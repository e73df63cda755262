"""The fused decoder of models whose layers attend or have a state (Qwen3.5).

Each layer is x + mixer(norm(x)), then x + fed(norm(x)), with norms that multiply by 1 + weight. A
mixer is a gated delta net, or attention with a gate a number beside its queries, of whose heads a
first part is rotated.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.ops import Ops
from csd.models.decoder import Decoder
from csd.models.delta_net import sigmoid
from csd.models.layer import Layer
from csd.models.lora_stacks import beside
from csd.state.recurrent import wide


class HybridDecoder(Decoder):
    """Weights and the forward pass; keys, values and states belong to the caller."""

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,  # [M] int32, -1 in padding
        position: torch.Tensor,  # [M] int32
        attend: Any,  # `csd.kernels.layer_attention`'s, with `states`
        node_k: torch.Tensor,  # [L, M, K, D] of the L layers that attend, written
        node_v: torch.Tensor,  # [L, M, K, D], written
        ops: Ops,
    ) -> torch.Tensor:
        """Hidden states [M, hidden] after the last norm."""
        self.follow()
        plain, ops = ops, replace(ops, rms_norm=centred(ops.rms_norm))
        x, residual, attending = F.embedding(token.clamp(min=0), self.embedding), None, 0
        for i, layer in enumerate(self.layers):
            x, residual = self._normed(ops, x, layer.input_norm, residual)
            if i in self.taps:
                self.tapped[i] = residual
            product = self.linear(x, layer.qkv)
            if "qkv" in layer.lora:
                product = beside(self.linear, x, product, layer.lora["qkv"])
            if layer.delta is not None:
                x = layer.delta(plain, product, attend.states, i - attending)
            else:
                nodes = node_k[attending], node_v[attending]
                x = self._attended(ops, product, layer, position, attend, attending, nodes)
                attending += 1
            x = self._summed(x, layer.out, layer.lora.get("out"))
            x, residual = self._normed(ops, x, layer.post_norm, residual)
            x = self._fed(ops, x, layer)
        return ops.rms_norm(x, self.norm, self.config.norm_eps, residual)[0]

    def _attended(
        self, ops: Ops, product: torch.Tensor, layer: Layer, position: torch.Tensor,
        attend: Callable, at: int, nodes: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Gated attention [M, H D]; at: the layer's number among those that attend."""
        c, M = self.config, product.shape[0]
        K, D = c.kv_heads, c.head_dim
        q, k, v = product.split((2 * c.heads * D, K * D, K * D), -1)
        # of each head a query, then a gate
        q, gate = q.view(M, c.heads, 2, D).unbind(2)
        k, v = k.reshape(M, K, D), v.reshape(M, K, D)
        q, _ = ops.rms_norm(q.contiguous(), layer.q_norm, c.norm_eps)
        k, _ = ops.rms_norm(k, layer.k_norm, c.norm_eps)
        q, k = self._rotated(ops, q, k, position)
        for node, x in zip(nodes, (k, v), strict=True):
            node.copy_(x)
        return attend(at, q).reshape(M, -1) * sigmoid(gate.reshape(M, -1))

    def _rotated(
        self, ops: Ops, q: torch.Tensor, k: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first numbers of each head rotated, as many as the tables have."""
        turns = self.cos.shape[1]
        first_q, first_k = q[..., :turns].contiguous(), k[..., :turns].contiguous()
        turned_k, unused = torch.empty_like(first_k), torch.empty_like(first_k)
        turned_q = ops.rotary(
            first_q, first_k, first_k, position, self.cos, self.sin, turned_k, unused
        )
        both = (turned_q, q), (turned_k, k)
        turned_q, turned_k = (torch.cat((first, x[..., turns:]), -1) for first, x in both)
        return turned_q, turned_k


def centred(rms_norm: Callable) -> Callable:
    """`rms_norm` that multiplies by 1 + weight, in float32 at least, and rounds once."""

    def norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        kind = wide(total.dtype)
        y, _ = rms_norm(total.to(kind), 1 + weight.to(kind), eps)
        return y.to(total.dtype), total

    return norm
