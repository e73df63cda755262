"""A minimal decoder over the rows of a pool, for the families in `csd/models/fused/families.py`.

`Layer` has the weights of a layer, `Norms` the norms that the config asks for, with their residual
sums. `Decoder` runs layers of attention, `HybridDecoder` models whose layers have either attention
or a state (Qwen3.5): each layer is x + mixer(norm(x)), then x + fed(norm(x)), with norms that
multiply by 1 + weight. A mixer is a gated delta net, or attention with one gate per number of its
queries, in which the first part of each head is rotated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from csd.kernels.layers.quantized import Quantized
from csd.kernels.ops import Ops
from csd.models.fused.config import ModelConfig, ModelSizes, properties_of
from csd.models.fused.delta_net import DeltaNet, sigmoid
from csd.models.fused.experts import Experts
from csd.models.fused.linear import linear
from csd.models.fused.lora import FusedAdapters, Stack, add_lora
from csd.models.fused.rope import rope_tables

# fused products of a layer, each made of one or more of a module's
PRODUCTS = "qkv", "out", "gate_up", "down"


@dataclass(slots=True)
class Layer:
    """Weights of one layer; F is the width of the feed-forward part, which experts replace."""

    input_norm: torch.Tensor | None  # [hidden]
    qkv: torch.Tensor  # [(H + 2 K) D, hidden]; other rows in a gated layer
    qkv_bias: torch.Tensor | None  # [(H + 2 K) D]
    q_norm: torch.Tensor | None  # [D], or [H D] for all heads at once
    k_norm: torch.Tensor | None  # [D], or [K D]
    out: torch.Tensor  # [hidden, H D]
    post_norm: torch.Tensor | None  # [hidden]
    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor  # [hidden, F]
    # norms of the outputs of attention and feed-forward
    attention_norm: torch.Tensor | None = None  # [hidden]
    mlp_norm: torch.Tensor | None = None  # [hidden]
    experts: Experts | None = None
    # in place of attention; q_norm and k_norm are None then
    delta: DeltaNet | None = None
    # LoRA added to each of the four products, by name
    lora: dict[str, list[Stack]] = field(default_factory=dict)


class Norms:
    """Mixin of a decoder with its norms."""

    config: ModelConfig

    def rms_norm(
        self,
        ops: Ops,
        x: torch.Tensor,
        weight: Any,
        *residual: torch.Tensor | None,
        **rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = dict(plus_one=True) if self.config.plus_one else {}
        return ops.rms_norm(x, weight, self.config.norm_eps, *residual, **rows, **kind)

    def _normed(
        self,
        ops: Ops,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
        **rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of x + residual, x + residual); without a weight, the sum twice."""
        if weight is not None:
            return self.rms_norm(ops, x, weight, residual, **rows)
        total = x if residual is None else residual + x
        return total, total

    def _left(self, ops: Ops, x: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Addend of a layer's part to the residual: x, normed if `norm` is given, and scaled."""
        if norm is not None:
            x, _ = self.rms_norm(ops, x, norm)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _whole_norm(self, ops: Ops, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Norm of whole rows x [M, W], which may be slices of wider rows."""
        return self.rms_norm(ops, x[:, None], weight)[0][:, 0]


class DecoderLike(Protocol):
    """Interface of a decoder to an engine: a `Decoder`, one split over devices, or your own."""

    @property
    def config(self) -> ModelSizes: ...

    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        attend: Callable,
        node_k: torch.Tensor,
        node_v: torch.Tensor,
        ops: Ops,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Decoder(Norms):
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
        frequencies: torch.Tensor | None = None,  # [D / 2]; None: the config's
        local_frequencies: torch.Tensor | None = None,  # of local layers, if they differ
    ):
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        # copies, since the module's own may be changed in place
        self.frequencies, self.local_frequencies = (
            None if w is None else w.clone() for w in (frequencies, local_frequencies)
        )
        # layers whose inputs a drafter reads, and these inputs in the last forward pass, by layer
        self.taps: tuple[int, ...] = ()
        self.tapped: dict[int, torch.Tensor] = {}
        # x, weight, bias -> x weight^T + bias; `csd.models.exact` replaces it
        self.linear: Callable = linear
        # x, weight, bias -> the same, or splits of it that the following norm or rotary adds up
        self.parts: Callable | None = None
        # x, gate_up -> SwiGLU of their product, if one function computes both
        self.gated: Callable | None = None
        # product, x, y, stacks -> y with the adapters' products of x added
        self.add_lora: Callable = add_lora
        # factor of the embedding's rows in a module that has one; None: the config's
        self.embedding_scale: float | None = None
        self.adapters: FusedAdapters | None = None
        self.head_lora: list[Stack] = []
        rotated = config.rotary_dim or config.head_dim
        made = rotated, config.context, embedding.dtype, embedding.device
        self.cos, self.sin = rope_tables(config.rope, *made, frequencies)
        self.local_cos, self.local_sin = self.cos, self.sin
        if config.local_rope is not None:
            self.local_cos, self.local_sin = rope_tables(
                config.local_rope, *made, local_frequencies
            )

    @property
    def is_plain(self) -> bool:
        """True for a Llama's layers without windows, replaced products and recorded inputs."""
        product = getattr(self.linear, "product", self.linear)
        changed = product is not linear or self.parts or self.gated or self.taps
        return self.config.is_llamas and self.config.is_plain and not changed

    def add_adapters(self, adapters: FusedAdapters) -> None:
        """Add LoRA to the products of all layers and of the head."""
        self.adapters, stacks = adapters, iter(adapters.stacks)
        for layer in self.layers:
            by_name = {name: next(stacks) for name in PRODUCTS}
            layer.lora = {name: stack for name, stack in by_name.items() if stack}
        self.head_lora = next(stacks)

    def begin_call(self) -> None:
        """Called before the first step of a call, which uses the adapters that are active now."""
        if self.adapters is not None:
            self.adapters.begin_call()

    def follow(self) -> None:
        """Called on the host before each pass: reads adapters that were trained meanwhile.

        Raises RuntimeError if they were merged or removed since the call began.
        """
        if self.adapters is not None:
            self.adapters.follow()

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,  # [M] int32, -1 in padding
        position: torch.Tensor,  # [M] int32
        attend: Callable,  # from `csd.kernels.attention.layer`
        node_k: torch.Tensor,  # [L, M, K, D], written
        node_v: torch.Tensor,  # [L, M, K, D], written
        ops: Ops,  # csd.kernels.ops.Ops, or an object with rms_norm, rotary and swiglu
    ) -> torch.Tensor:
        """Hidden states [M, hidden] after the last norm.

        attend(layer, q [M, H, D]) returns [M, H, D], and takes `properties` if a layer has some.
        Before it is called, the layer's keys and values of all rows are written to node_k, node_v.
        """
        self.follow()
        x, residual = self.embedded(token), None
        for i in range(len(self.layers)):
            x, residual = self.layer(i, x, residual, token, position, attend, node_k, node_v, ops)
        return self.rms_norm(ops, x, self.norm, residual)[0]

    @property
    def _gathers(self) -> bool:
        """True if the first layer's norm gathers the rows of the embedding."""
        return self.config.is_llamas and not isinstance(self.embedding, Quantized)

    def embedded(self, token: torch.Tensor) -> torch.Tensor:
        """Input of the first layer [M, hidden]; in a Llama the embedding, whose norm gathers."""
        c = self.config
        if self._gathers:
            return self.embedding
        scale = c.embedding_scale if self.embedding_scale is None else self.embedding_scale
        return F.embedding(token.clamp(min=0), self.embedding) * scale

    def layer(
        self,
        i: int,
        x: torch.Tensor,  # [M, hidden], or splits of it; `embedded` for the first layer
        residual: torch.Tensor | None,  # [M, hidden]
        token: torch.Tensor,
        position: torch.Tensor,
        attend: Callable,
        node_k: Any,
        node_v: Any,
        ops: Ops,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer i; returns its output and the residual, whose sum the next norm takes."""
        c, layer, linear = self.config, self.layers[i], self.linear
        M, q_width, kv_width = token.shape[0], c.heads * c.head_dim, c.kv_heads * c.head_dim
        # a padding row computes token 0, and its result is not used
        rows = dict(rows=token) if i == 0 and self._gathers else {}
        x, residual = self._normed(ops, x, layer.input_norm, residual, **rows)
        if i in self.taps:
            self.tapped[i] = residual
        lora = layer.lora
        # norms of heads take the product, not its splits
        parts = None if c.qk_norm or "qkv" in lora else self.parts
        qkv = (parts or linear)(x, layer.qkv, layer.qkv_bias)
        if "qkv" in lora:
            qkv = self.add_lora(linear, x, qkv, lora["qkv"])
        q, k, v = qkv.split((q_width, kv_width, kv_width), dim=-1)
        if c.whole_qk_norm:
            q = self._whole_norm(ops, q, layer.q_norm)
            k = self._whole_norm(ops, k, layer.k_norm)
        q, k, v = (x.view(*x.shape[:-1], -1, c.head_dim) for x in (q, k, v))
        if c.qk_norm and not c.whole_qk_norm:
            q, _ = self.rms_norm(ops, q, layer.q_norm)
            k, _ = self.rms_norm(ops, k, layer.k_norm)
        added = dict(bias=layer.qkv_bias) if q.dim() == 4 else {}
        # position 0 rotates nothing
        turned = c.rotated is None or c.rotated[i]
        positions = position if turned else torch.zeros_like(position)
        tables = (self.local_cos, self.local_sin) if c.is_local(i) else (self.cos, self.sin)
        q = ops.rotary(q, k, v, positions, *tables, node_k[i], node_v[i], **added)
        attended = attend(i, q, **properties_of(c, i)).reshape(M, q_width)
        x = self._summed(attended, layer.out, lora.get("out"))
        x = self._left(ops, x, layer.attention_norm)
        x, residual = self._normed(ops, x, layer.post_norm, residual)
        return self._left(ops, self._fed(ops, x, layer), layer.mlp_norm), residual

    def _fed(self, ops: Ops, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Feed-forward part of normed x [M, hidden]: [M, hidden], or splits of it."""
        linear, lora = self.linear, layer.lora
        if layer.experts is not None:
            return layer.experts(linear, ops.swiglu, x)
        gelu = dict(gelu=True) if self.config.gelu else {}
        if self.gated and not gelu and "gate_up" not in lora:
            x = self.gated(x, layer.gate_up)
        else:
            up = linear(x, layer.gate_up)
            if "gate_up" in lora:
                up = self.add_lora(linear, x, up, lora["gate_up"])
            x = ops.swiglu(up, **gelu)
        return self._summed(x, layer.down, lora.get("down"))

    def _summed(
        self, x: torch.Tensor, weight: torch.Tensor, lora: list[Stack] | None
    ) -> torch.Tensor:
        """The product with `weight` and `lora`, or splits of it that the following norm adds up."""
        if lora is None:
            # splits need a norm of their sum right after, which only a Llama's layers have
            return (self.parts if self.parts and self.config.is_llamas else self.linear)(x, weight)
        return self.add_lora(self.linear, x, self.linear(x, weight), lora)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, V] in the model's dtype."""
        values = self.linear(hidden, self.head)
        if self.head_lora:
            values = self.add_lora(self.linear, hidden, values, self.head_lora)
        if self.config.logit_divisor != 1:
            values = values / self.config.logit_divisor
        cap = self.config.final_cap
        return values if cap is None else torch.tanh(values / cap) * cap


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
                product = self.add_lora(self.linear, x, product, layer.lora["qkv"])
            if layer.delta is not None:
                x = layer.delta(ops, product, attend.states, i - attending)
            else:
                nodes = node_k[attending], node_v[attending]
                x = self._attended(ops, product, layer, position, attend, attending, nodes)
                attending += 1
            x = self._summed(x, layer.out, layer.lora.get("out"))
            x, residual = self._normed(ops, x, layer.post_norm, residual)
            x = self._fed(ops, x, layer)
        return self.rms_norm(ops, x, self.norm, residual)[0]

    def _attended(
        self,
        ops: Ops,
        product: torch.Tensor,
        layer: Layer,
        position: torch.Tensor,
        attend: Callable,
        at: int,
        nodes: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Gated attention [M, H D]; at: the layer's index among those with attention."""
        c, M = self.config, product.shape[0]
        K, D = c.kv_heads, c.head_dim
        q, k, v = product.split((2 * c.heads * D, K * D, K * D), -1)
        # each head has a query, then a gate
        q, gate = q.view(M, c.heads, 2, D).unbind(2)
        q, _ = self.rms_norm(ops, q, layer.q_norm)
        k, _ = self.rms_norm(ops, k.view(M, K, D), layer.k_norm)
        q = ops.rotary(q, k, v.view(M, K, D), position, self.cos, self.sin, *nodes)
        return attend(at, q).reshape(M, -1) * sigmoid(gate.reshape(M, -1))
