"""Sizes and options of a model that the fused decoder runs, read from its config."""

from dataclasses import dataclass
from typing import Any, Protocol

from csd.models.config_checks import (
    SUPPORTED,
    is_dequantised,
    refuse_dense_layers,
    refuse_field,
    refuse_window,
    rotated_layers,
)
from csd.models.delta_config import DeltaLayers
from csd.models.foreign_fields import refuse_foreign_fields
from csd.models.rope_config import rope_of, rotary_dim
from csd.state.kv_cache import LayerShape
from csd.state.recurrent import StateSizes

# How a family differs from Llama: fields of `ModelConfig`, as values or as names of its config's
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "qwen3_moe": dict(
        qk_norm=True, intermediate="moe_intermediate_size", experts="num_experts",
        experts_per_token="num_experts_per_tok", experts_sum_to_one="norm_topk_prob",
    ),
    "smollm3": dict(rotated="no_rope_layers"),
    "granite": dict(
        scale="attention_multiplier", embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier", logit_divisor="logits_scaling",
    ),
    "phi3": dict(joined=True),
    "olmo2": dict(qk_norm=True, whole_qk_norm=True, post_norm=True),
    "qwen3_5_text": dict(qk_norm=True, centred_norm=True, gated=True, delta=DeltaLayers.of),
}  # fmt: skip


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
    context: int  # positions it was made for
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple[float, float, float, int] | None = None  # llama3: factor, low, high, old
    rope_type: str = "default"  # frequencies of "linear" and "yarn" are the module's
    rope_attention: float = 1.0  # cosines and sines are multiplied by it
    qkv_bias: bool = False
    qk_norm: bool = False  # of each head
    tied: bool = False
    whole_qk_norm: bool = False  # of all heads at once
    post_norm: bool = False  # norms are of what a layer's parts give, not of what they get
    joined: bool = False  # in the checkpoint, qkv is one matrix, and so are gate and up
    rotated: tuple[bool, ...] | None = None  # by layer; None rotates in all
    scale: float | None = None  # of attention; None is head_dim^-0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds to the residual
    logit_divisor: float = 1.0
    experts: int = 0  # of a layer; `intermediate` is the width of each
    experts_per_token: int = 0
    experts_sum_to_one: bool = False  # whether the weights of a token's experts are made to
    centred_norm: bool = False  # norms but those of delta nets multiply by 1 + weight
    gated: bool = False  # what attention gives is multiplied by the sigmoid of a gate beside q
    rotary_dim: int | None = None  # numbers of a head that are rotated, the first; None is all
    delta: DeltaLayers | None = None  # layers with a state

    @property
    def is_llamas(self) -> bool:
        """True if nothing but biases and norms of heads differs from Llama."""
        beyond = (
            self.whole_qk_norm, self.post_norm, self.rotated, self.scale, self.experts,
            self.embedding_scale != 1, self.residual_scale != 1, self.logit_divisor != 1,
            self.centred_norm, self.gated, self.rotary_dim, self.delta,
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
        refuse_field(config, "hidden_act", ("silu",))
        refuse_field(config, "mlp_bias", (False, None))
        if family != "qwen2":
            refuse_field(config, "attention_bias", (False, None))
        if "experts" in FAMILIES[family]:
            refuse_dense_layers(config)
        refuse_foreign_fields(config, SUPPORTED)
        if getattr(config, "pretraining_tp", 1) not in (1, None):
            raise ValueError("pretraining_tp must be 1")
        if "delta" not in FAMILIES[family]:
            refuse_window(config)
        heads = config.num_attention_heads
        partial = rotary_dim(config) if "delta" in FAMILIES[family] else None
        theta, scaling, kind, attention = rope_of(config, partial is not None)
        own = {
            name: getattr(config, value) if isinstance(value, str) else value
            for name, value in FAMILIES[family].items()
        }
        if "delta" in own:
            own["delta"] = own["delta"](config)
        if "rotated" in own:
            own["rotated"] = rotated_layers(own["rotated"], attention)
        return cls(
            family=family,
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=own.pop("intermediate", config.intermediate_size),
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            context=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            rope_type=kind,
            rope_attention=attention,
            rotary_dim=partial,
            tied=bool(config.tie_word_embeddings),
            **own,
        )


def scale_of(config: ModelSizes) -> float:
    """Factor of the products of queries and keys in attention."""
    own = getattr(config, "scale", None)
    return config.head_dim**-0.5 if own is None else own
