"""Fused decoder of models whose layers have either attention or a state (Qwen3.5).

Each layer is x + mixer(norm(x)), then x + fed(norm(x)), with norms that multiply by 1 + weight. A
mixer is a gated delta net, or attention with one gate per number of its queries, in which the first
part of each head is rotated.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.ops import Ops
from csd.models.decoder import Decoder
from csd.models.delta_net import sigmoid
from csd.models.layer import Layer
from csd.models.lora_stacks import add_lora


class HybridDecoder(Decoder):
    """Weights and the forward pass; keys, values and states belong to the caller."""

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,  # [M] int32, -1 in padding
        position: torch.Tensor,  # [M] int32
        attend: Any,  # from `csd.kernels.attention.layer`, with `states`
        node_k: torch.Tensor,  # [L, M, K, D], L layers with attention, written
        node_v: torch.Tensor,  # [L, M, K, D], written
        ops: Ops,
    ) -> torch.Tensor:
        """Hidden states [M, hidden] after the last norm."""
        self.follow()
        x, residual, attending = F.embedding(token.clamp(min=0), self.embedding), None, 0
        for i, layer in enumerate(self.layers):
            x, residual = self._normed(ops, x, layer.input_norm, residual)
            if i in self.taps:
                self.tapped[i] = residual
            product = self.linear(x, layer.qkv)
            if "qkv" in layer.lora:
                product = add_lora(self.linear, x, product, layer.lora["qkv"])
            if layer.delta is not None:
                x = layer.delta(ops, product, attend.states, i - attending)
            else:
                nodes = node_k[attending], node_v[attending]
                x = self._attended(ops, product, layer, position, attend, attending, nodes)
                attending += 1
            x = self._summed(x, layer.out, layer.lora.get("out"))
            x, residual = self._normed(ops, x, layer.post_norm, residual)
            x = self._fed(ops, x, layer)
        return self._norm(ops, x, self.norm, residual)[0]

    def _attended(
        self, ops: Ops, product: torch.Tensor, layer: Layer, position: torch.Tensor,
        attend: Callable, at: int, nodes: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Gated attention [M, H D]; at: the layer's index among those with attention."""
        c, M = self.config, product.shape[0]
        K, D = c.kv_heads, c.head_dim
        q, k, v = product.split((2 * c.heads * D, K * D, K * D), -1)
        # each head has a query, then a gate
        q, gate = q.view(M, c.heads, 2, D).unbind(2)
        q, _ = self._norm(ops, q, layer.q_norm)
        k, _ = self._norm(ops, k.view(M, K, D), layer.k_norm)
        q = ops.rotary(q, k, v.view(M, K, D), position, self.cos, self.sin, *nodes)
        return attend(at, q).reshape(M, -1) * sigmoid(gate.reshape(M, -1))
