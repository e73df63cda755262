"""Sizes and options of a model that the fused decoder runs, read from its config."""

from dataclasses import dataclass
from typing import Any, Protocol

from csd.kernels.tree_attention.properties import Properties
from csd.models.config_checks import (
    SUPPORTED,
    is_dequantised,
    local_layers,
    refuse_dense_layers,
    refuse_field,
    rotated_layers,
)
from csd.models.delta_config import DeltaLayers
from csd.models.families import FAMILIES, head_dim_of
from csd.models.foreign_fields import refuse_foreign_fields
from csd.models.rope_config import Rope, context_of, ropes_of
from csd.state.kv_cache import LayerShape
from csd.state.recurrent import StateSizes


class ModelSizes(Protocol):
    """Sizes that an engine reads of any model."""

    @property
    def family(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder, and how it differs from Llama's."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # positions it was made for, or for which its rotary embedding is one
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple[float, float, float, int] | None = None  # llama3: factor, low, high, old
    rope_type: str = "default"  # frequencies of "linear" and "yarn" are the module's
    rope_attention: float = 1.0  # cosines and sines are multiplied by it
    qkv_bias: bool = False
    qk_norm: bool = False  # of each head
    tied: bool = False
    whole_qk_norm: bool = False  # of all heads at once
    norms: str = "before"  # of what a layer's parts get; "behind", of what they give; or "both"
    plus_one: bool = False  # norms have 1 + weight in the place of weight
    gelu: bool = False  # in the place of SiLU
    joined: bool = False  # in the checkpoint, qkv is one matrix, and so are gate and up
    rotated: tuple[bool, ...] | None = None  # by layer; None rotates in all
    scale: float | None = None  # of attention; None is head_dim^-0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds to the residual
    logit_divisor: float = 1.0
    experts: int = 0  # of a layer; `intermediate` is the width of each
    experts_per_token: int = 0
    experts_sum_to_one: bool = False  # whether the weights of a token's experts are made to
    local: tuple[bool, ...] | None = None  # by layer, whether it is; None: none is
    softcap: float | None = None  # scores s of attention become softcap * tanh(s / softcap)
    final_cap: float | None = None  # and logits likewise
    rotary_dim: int | None = None  # numbers of a head that are rotated, the first; None: all
    window: int | None = None  # keys that a row of a local layer sees at most; None: all
    local_rope: Rope | None = None  # of local layers, where it is another one
    gated: bool = False  # what attention gives is multiplied by the sigmoid of a gate beside q
    delta: DeltaLayers | None = None  # layers with a state

    @property
    def is_llamas(self) -> bool:
        """True if nothing but biases and norms of heads differs from Llama."""
        beyond = (
            self.whole_qk_norm, self.norms != "before", self.plus_one, self.gelu, self.rotated,
            self.scale, self.experts, self.embedding_scale != 1,
            self.residual_scale != 1, self.logit_divisor != 1, self.final_cap, self.local_rope,
            self.rotary_dim not in (None, self.head_dim), self.gated, self.delta,
        )  # fmt: skip
        return not any(beyond)

    @property
    def states(self) -> StateSizes | None:
        """Shape of layers whose memory of a text is a state."""
        return None if self.delta is None else self.delta.sizes

    @property
    def shapes(self) -> list[LayerShape] | None:
        """Keys and values of the layers that attend, None where all do."""
        if self.delta is None:
            return None
        shape = LayerShape(self.kv_heads, self.head_dim, self.head_dim)
        return [shape] * self.delta.layers.count(False)

    @property
    def unlike_layers(self) -> int:
        """Number of first layers among which each kind of layer is; one more than the first
        of a kind, since a model's first layer reads the embedding."""
        kinds = [
            (
                self.is_local(i),
                self.rotated and self.rotated[i],
                self.delta and self.delta.layers[i],
            )
            for i in range(self.layers)
        ]
        return min(self.layers, 2 + max(kinds.index(kind) for kind in kinds))

    def is_local(self, layer: int) -> bool:
        return self.local is not None and self.local[layer]

    @property
    def rope(self) -> Rope:
        return Rope(self.rope_theta, self.rope_scaling, self.rope_type, self.rope_attention)

    @property
    def reach(self) -> int | None:
        """Keys that a row of any layer sees at most; None where a layer's see all."""
        every = self.local is not None and all(self.local[: self.layers])
        return self.window if every else None

    @property
    def is_plain(self) -> bool:
        """True if no layer's attention has a window or a cap."""
        return self.softcap is None and (self.local is None or self.window is None)

    def properties(self, layer: int) -> Properties | None:
        """Properties of a layer's attention; None where it has none beyond a scale."""
        window = self.window if self.is_local(layer) else None
        if window is None and self.softcap is None:
            return None
        return Properties(
            self.kv_heads, self.head_dim, self.head_dim, scale_of(self), window,
            softcap=self.softcap,
        )  # fmt: skip

    @classmethod
    def from_transformers(cls, config: Any) -> "ModelConfig":
        """Raises ValueError naming what the model has that csd does not run."""
        family = getattr(config, "model_type", None)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{family!r} is an encoder-decoder; csd runs decoders: {SUPPORTED}")
        if family not in FAMILIES:
            raise ValueError(f"model type {family!r} is not supported; {SUPPORTED}")
        if not is_dequantised(getattr(config, "quantization_config", None)):
            raise ValueError(
                "quantised weights are not supported; load the model in bfloat16, float16 or "
                "float32 (a GGUF file is dequantised when loaded)"
            )
        differs = FAMILIES[family]
        for name in ("hidden_act", "hidden_activation"):
            refuse_field(config, name, ("gelu_pytorch_tanh" if "gelu" in differs else "silu",))
        refuse_field(config, "mlp_bias", (False, None))
        refuse_field(config, "use_bidirectional_attention", (False, None))
        if "softcap" not in differs:
            refuse_field(config, "attn_logit_softcapping", (None,))
        if family != "qwen2":
            refuse_field(config, "attention_bias", (False, None))
        if "experts" in differs:
            refuse_dense_layers(config)
        refuse_foreign_fields(config, SUPPORTED)
        heads = config.num_attention_heads
        rope, local_rope = ropes_of(config)
        local = None if "delta" in differs else local_layers(config)
        window = getattr(config, "sliding_window", None)
        if local is None or window is None or window >= context_of(config):
            # with a rotary embedding of their own, layers are local without a window
            local, window = local if local_rope else None, None
        own = {name: x(config) if callable(x) else x for name, x in differs.items()}
        if "rotated" in own:
            own["rotated"] = rotated_layers(own["rotated"], rope.attention)
        return cls(
            family=family,
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=own.pop("intermediate", config.intermediate_size),
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=head_dim_of(config),
            context=context_of(config),
            norm_eps=config.rms_norm_eps,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rope_type=rope.kind,
            rope_attention=rope.attention,
            local=local,
            window=window,
            local_rope=local_rope,
            tied=bool(config.tie_word_embeddings),
            **own,
        )


def scale_of(config: ModelSizes) -> float:
    """Factor of the products of queries and keys in attention."""
    own = getattr(config, "scale", None)
    return config.head_dim**-0.5 if own is None else own


def properties_of(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Arguments of `attend` for a layer, beside its queries."""
    found = config.properties(layer)
    return {} if found is None else dict(properties=found)
