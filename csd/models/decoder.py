"""A minimal Llama, Mistral, Qwen2 or Qwen3 decoder over the rows of a pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from csd.kernels.ops import Ops
from csd.models.config import ModelConfig, ModelSizes
from csd.models.linear import linear
from csd.models.rope import rope_tables


@dataclass(slots=True)
class Layer:
    """Weights of one layer; F is the width of the feed-forward part."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(H + 2 K) D, hidden]
    qkv_bias: torch.Tensor | None  # [(H + 2 K) D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    out: torch.Tensor  # [hidden, H D]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor  # [hidden, F]


class DecoderLike(Protocol):
    """What an engine asks of a model: a `Decoder`, one split over devices, or your own."""

    @property
    def config(self) -> ModelSizes: ...

    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        node_k: torch.Tensor,
        node_v: torch.Tensor,
        ops: Ops,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Decoder:
    """Weights and the forward pass; keys and values belong to the caller."""

    name = "fused"
    why = None  # nothing ruled it out

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,  # [V, hidden]
        layers: list[Layer],
        norm: torch.Tensor,  # [hidden]
        head: torch.Tensor,  # [V, hidden]
        frequencies: torch.Tensor | None = None,  # [D / 2], the config's when not given
    ):
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        # a copy: the module's own may be changed in place
        self.frequencies = None if frequencies is None else frequencies.clone()
        # layers whose inputs a drafter reads, and these of the last forward pass, by layer
        self.taps: tuple[int, ...] = ()
        self.tapped: dict[int, torch.Tensor] = {}
        # x, weight, bias -> x weight^T + bias; `csd.models.exact` puts another in its place
        self.linear: Callable = linear
        # x, weight, bias -> the same, or splits of it that the norm or rotary behind it adds up
        self.parts: Callable | None = None
        # x, gate_up -> SwiGLU of their product, where one function has both
        self.gated: Callable | None = None
        self.cos, self.sin = rope_tables(
            config, config.context, embedding.dtype, embedding.device, frequencies
        )

    @property
    def is_plain(self) -> bool:
        """Whether no other product stands in its place, and no layer's input is kept."""
        given = getattr(self.linear, "product", self.linear)
        return given is linear and not (self.parts or self.gated or self.taps)

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,  # [M] int32, -1 in padding
        position: torch.Tensor,  # [M] int32
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        node_k: torch.Tensor,  # [L, M, K, D], written
        node_v: torch.Tensor,  # [L, M, K, D], written
        ops: Ops,  # csd.kernels.ops.Ops, or anything with rms_norm, rotary and swiglu
    ) -> torch.Tensor:
        """Hidden states [M, hidden] after the last norm.

        attend(layer, q [M, H, D]) gives [M, H, D]; when it is called, the layer's keys and values
        of all rows are in node_k and node_v.
        """
        c = self.config
        M, q_width, kv_width = token.shape[0], c.heads * c.head_dim, c.kv_heads * c.head_dim
        linear, x, residual = self.linear, self.embedding, None
        parts, gated = self.parts or linear, self.gated
        for i, layer in enumerate(self.layers):
            # a padding row computes token 0, and nobody looks
            rows = dict(rows=token) if i == 0 else {}
            x, residual = ops.rms_norm(x, layer.input_norm, c.norm_eps, residual, **rows)
            if i in self.taps:
                self.tapped[i] = residual
            # norms of heads take whole ones
            product = linear if c.qk_norm else parts
            qkv = product(x, layer.qkv, layer.qkv_bias)
            q, k, v = (
                heads.view(*heads.shape[:-1], -1, c.head_dim)
                for heads in qkv.split((q_width, kv_width, kv_width), dim=-1)
            )
            if c.qk_norm:
                q, _ = ops.rms_norm(q, layer.q_norm, c.norm_eps)
                k, _ = ops.rms_norm(k, layer.k_norm, c.norm_eps)
            added = dict(bias=layer.qkv_bias) if q.dim() == 4 else {}
            q = ops.rotary(q, k, v, position, self.cos, self.sin, node_k[i], node_v[i], **added)
            x = parts(attend(i, q).reshape(M, q_width), layer.out)
            x, residual = ops.rms_norm(x, layer.post_norm, c.norm_eps, residual)
            x = gated(x, layer.gate_up) if gated else ops.swiglu(linear(x, layer.gate_up))
            x = parts(x, layer.down)
        return ops.rms_norm(x, self.norm, c.norm_eps, residual)[0]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, V] in the model's dtype."""
        return self.linear(hidden, self.head)
