"""Sizes and options of a model that the fused decoder runs, read from its config.

Fields that the config's class does not define and its module ignores are refused if they would
change the model: a file with these fields was written by another program, for a different model. No
list of their names is complete, so a field is judged by the words in its name and by its value.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from csd.kernels.attention.reference import Properties
from csd.models.fused.families import (
    FAMILIES,
    SUPPORTED,
    DeltaLayers,
    head_dim_of,
    is_dequantised,
    local_layers,
    refuse_dense_layers,
    refuse_field,
    rotated_layers,
)
from csd.models.fused.rope import Rope, context_of, ropes_of
from csd.state.kv_cache import LayerShape
from csd.state.recurrent import StateSizes


class TextSizes(Protocol):
    """Sizes of a model that limit its texts: tokens in the vocabulary, and positions."""

    @property
    def vocab(self) -> int: ...
    @property
    def context(self) -> int: ...


class ModelSizes(TextSizes, Protocol):
    """Sizes of any model that an engine reads."""

    @property
    def family(self) -> str: ...
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
    context: int  # positions it was made for, or up to which it has one rotary embedding
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple[float, float, float, int] | None = None  # llama3: factor, low, high, old
    rope_type: str = "default"  # "linear" and "yarn" take the module's frequencies
    rope_attention: float = 1.0  # factor of cosines and sines
    qkv_bias: bool = False
    qk_norm: bool = False  # norms of queries and keys, per head
    tied: bool = False
    whole_qk_norm: bool = False  # these norms span all heads at once
    norms: str = "pre"  # on the inputs of attention and MLP; "post": on their outputs; or "both"
    plus_one: bool = False  # norms multiply by 1 + weight in place of weight
    gelu: bool = False  # GELU in place of SiLU
    joined: bool = False  # in the checkpoint, qkv is one matrix, and so are gate and up
    rotated: tuple[bool, ...] | None = None  # per layer, whether it rotates; None: all do
    scale: float | None = None  # of attention scores; None: head_dim^-0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of each addend to the residual
    logit_divisor: float = 1.0
    experts: int = 0  # per layer; `intermediate` is the width of each
    experts_per_token: int = 0
    experts_sum_to_one: bool = False  # whether a token's weights are normalised to sum 1
    local: tuple[bool, ...] | None = None  # per layer, whether it is local; None: none is
    softcap: float | None = None  # scores s of attention become softcap * tanh(s / softcap)
    final_cap: float | None = None  # cap of the logits, by the same function
    rotary_dim: int | None = None  # how many first numbers of a head rotate; None: all
    window: int | None = None  # most keys that a row of a local layer sees; None: all
    local_rope: Rope | None = None  # of local layers, if it differs
    gated: bool = False  # sigmoid of a gate, computed with q, multiplies attention's output
    delta: DeltaLayers | None = None  # layers with a state

    @property
    def is_llamas(self) -> bool:
        """True if nothing but biases and norms of heads differs from Llama."""
        beyond = (
            self.whole_qk_norm,
            self.norms != "pre",
            self.plus_one,
            self.gelu,
            self.rotated,
            self.scale,
            self.experts,
            self.embedding_scale != 1,
            self.residual_scale != 1,
            self.logit_divisor != 1,
            self.final_cap,
            self.local_rope,
            self.rotary_dim not in (None, self.head_dim),
            self.gated,
            self.delta,
        )
        return not any(beyond)

    @property
    def states(self) -> StateSizes | None:
        """Sizes of the layers with a state; None if there are none."""
        return None if self.delta is None else self.delta.sizes

    @property
    def shapes(self) -> list[LayerShape] | None:
        """Shapes of keys and values of the layers with attention; None if all layers have it."""
        if self.delta is None:
            return None
        shape = LayerShape(self.kv_heads, self.head_dim, self.head_dim)
        return [shape] * self.delta.layers.count(False)

    @property
    def unlike_layers(self) -> int:
        """Number of first layers that include every kind of layer, plus one.

        One more, since a model's first layer reads the embedding.
        """
        flags = [x for x in (self.local, self.rotated, self.delta and self.delta.layers) if x]
        kinds = [tuple(x[i] for x in flags) for i in range(self.layers)]
        return min(self.layers, 2 + max(kinds.index(kind) for kind in kinds))

    def is_local(self, layer: int) -> bool:
        return self.local is not None and self.local[layer]

    @property
    def rope(self) -> Rope:
        return Rope(self.rope_theta, self.rope_scaling, self.rope_type, self.rope_attention)

    @property
    def reach(self) -> int | None:
        """Most keys that a row of any layer sees; None if the rows of some layer see all."""
        every = self.local is not None and all(self.local[: self.layers])
        return self.window if every else None

    @property
    def is_plain(self) -> bool:
        """True if no layer's attention has a window or a cap."""
        return self.softcap is None and (self.local is None or self.window is None)

    @classmethod
    def from_transformers(cls, config: Any) -> "ModelConfig":
        """Read a `transformers` config. Raises ValueError naming what the decoder does not run."""
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
        _refuse_unknown_fields(config)
        heads = config.num_attention_heads
        rope, local_rope = ropes_of(config)
        context = context_of(config)
        if context is None:
            raise ValueError(f"max_position_embeddings must be set, got None; {SUPPORTED}")
        local = None if "delta" in differs else local_layers(config)
        window = getattr(config, "sliding_window", None)
        if local is None or window is None or window >= context:
            # layers with their own rotary embedding are local without a window
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
            context=context,
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
    """Factor of the products of queries and keys in attention; head_dim^-0.5 by default."""
    own = getattr(config, "scale", None)
    return config.head_dim**-0.5 if own is None else own


def properties_of(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Keyword arguments of `attend` for a layer: its properties if it has a window or a cap."""
    window = config.window if config.is_local(layer) else None
    if window is None and config.softcap is None:
        return {}
    sizes = config.kv_heads, config.head_dim, config.head_dim
    return dict(properties=Properties(*sizes, scale_of(config), window, softcap=config.softcap))


# parts of the names of fields that change a decoder's logits
_WORDS = (
    "activation",
    "alibi",
    "attention_chunk",
    "bias",
    "bidirectional",
    "causal",
    "clip",
    "cross_attention",
    "expert",
    "interleave",
    "logn",
    "lora_rank",
    "moe_",
    "multiplier",
    "mup",
    "norm",
    "ntk",
    "prefix_lm",
    "residual",
    "rope",
    "rotary",
    "scal",
    "shared_kv",
    "sink",
    "softcap",
    "temperature_tuning",
)
# names with these are factors, for which 1 changes nothing
_FACTORS = ("multiplier", "scal", "factor", "pct", "ratio")
_HARMLESS: dict[str, tuple] = {
    "is_causal": (True,),
    "use_rope": (True,),
    "hidden_activation": ("silu",),
    "activation_function": ("silu",),
    "norm_type": ("rmsnorm", "rms_norm"),
}
# fields that state what a family's module computes in any case
_ALWAYS: dict[str, tuple[str, ...]] = {
    "qwen2": ("attention_bias", "qkv_bias"),
    "qwen3": ("qk_norm", "use_qk_norm"),
}


def _refuse_unknown_fields(config: Any) -> None:
    """Raises ValueError, naming field and value, for a `transformers` config with such a field."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[config.model_type]().to_dict()
    for name, value in config.to_dict().items():
        if name in known or name in _ALWAYS.get(config.model_type, ()):
            continue
        if any(word in name.lower() for word in _WORDS) and not _changes_nothing(name, value):
            raise ValueError(
                f"{name}={value!r} is not supported: no {config.model_type} model of transformers "
                f"computes with it; {SUPPORTED}"
            )


def _changes_nothing(name: str, value: Any) -> bool:
    if name in _HARMLESS:
        return value is None or value in _HARMLESS[name]
    # private, or an epsilon of a norm that the decoder does not have
    if name.startswith("_") or name.endswith(("_eps", "_epsilon")):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return not value
    if "expert" in name:
        return value in (0, 1)
    return value == (1 if any(word in name for word in _FACTORS) else 0)
