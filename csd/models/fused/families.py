"""Families of the fused decoder, by their differences from Llama.

`FAMILIES` has the fields of `csd.models.fused.config.ModelConfig` that differ: values, or functions
that read a `transformers` config, such as that of the layers with a state (`DeltaLayers`). Other
functions refuse fields of a config that rule out the fused decoder.
"""

from dataclasses import dataclass
from operator import attrgetter as of
from typing import Any

from csd.models.fused.rope import FULL, LOCAL
from csd.state.recurrent import ConvSize, StateSize, StateSizes

# families in which a window applies to all layers, whatever their layer_types are
ALL_LOCAL = ("mistral", "phi3", "qwen3_moe")
SUPPORTED = (
    "supported are Llama 2/3, Mistral, Qwen2/2.5, Qwen3 (dense and experts), Qwen3.5 (dense), "
    "SmolLM3, Granite 3, Phi-3/4, OLMo 2/3 and Gemma 2/3"
)


def rotated_layers(layers: Any, attention: float) -> tuple[bool, ...] | None:
    """Per layer, whether it has a rotary embedding; None if all have."""
    rotated = tuple(map(bool, layers))
    if all(rotated):
        return None
    if attention != 1:
        raise ValueError(
            "layers without rotary embedding are not supported together with a rotary embedding "
            f"that multiplies by {attention}"
        )
    return rotated


def refuse_dense_layers(config: Any) -> None:
    """Raises ValueError if some layers have experts and others do not."""
    dense = getattr(config, "mlp_only_layers", None)
    if dense or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"layers without experts (mlp_only_layers={dense}, "
            f"decoder_sparse_step={config.decoder_sparse_step}) are not supported together with "
            f"layers of experts; {SUPPORTED}"
        )


def is_dequantised(quantization: Any) -> bool:
    """True if a config's weights are plain numbers once they are loaded."""
    # transformers leaves a mark on models from GGUF files, whose weights it has dequantised
    if quantization is None:
        return True
    method = getattr(quantization, "quant_method", None)
    if isinstance(quantization, dict):
        method = quantization.get("quant_method")
    return str(getattr(method, "value", method)).lower() == "gguf"


def refuse_field(config: Any, name: str, allowed: tuple) -> None:
    """Raises ValueError if a field is set to a value that is not in `allowed`."""
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported, only {allowed[0]!r}; {SUPPORTED}")


def local_layers(config: Any) -> tuple[bool, ...] | None:
    """Per layer, whether it attends within the config's window; None if none does.

    Raises ValueError for other kinds of layers, and for local layers without a window.
    """
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if config.model_type in ALL_LOCAL or types is None:
        return None if window is None or config.model_type not in ALL_LOCAL else (True,) * count
    other = sorted(set(types) - {FULL, LOCAL})
    if other:
        raise ValueError(f"layer_types of {other[0]!r} are not supported; {SUPPORTED}")
    if LOCAL not in types:
        return None
    if window is None:
        raise ValueError(f"sliding_window must be given with layer_types of {LOCAL!r}, got None")
    return tuple(kind == LOCAL for kind in types[:count])


@dataclass(frozen=True, slots=True)
class DeltaLayers:
    """Flags of the layers that are gated delta nets, and the sizes of one."""

    layers: tuple[bool, ...]
    conv: ConvSize
    state: StateSize

    @classmethod
    def of(cls, config: Any) -> "DeltaLayers":
        """Read a `transformers` config. Raises ValueError for layers of other kinds."""
        kinds = {"linear_attention": True, "full_attention": False}
        other = sorted(set(config.layer_types) - set(kinds))
        if other:
            raise ValueError(f"layer_types of {other[0]!r} are not supported")
        layers = tuple(kinds[kind] for kind in config.layer_types)
        if all(layers):
            raise ValueError("layer_types without 'full_attention' are not supported")
        size = StateSize(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        channels = 2 * size.key_heads * size.key_dim + size.heads * size.value_dim
        return cls(layers, ConvSize(channels, config.linear_conv_kernel_dim), size)

    @property
    def sizes(self) -> StateSizes:
        count = sum(self.layers)
        return StateSizes((self.conv,) * count, (self.state,) * count)


def head_dim_of(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: Any) -> int:
    return int(head_dim_of(config) * (config.rope_parameters.get("partial_rotary_factor") or 1))


# fields of a family: values, or functions of a `transformers` config
OLMO = dict(qk_norm=True, whole_qk_norm=True, norms="post")
GEMMA = dict(
    norms="both",
    plus_one=True,
    gelu=True,
    embedding_scale=lambda c: c.hidden_size**0.5,
    scale=lambda c: c.query_pre_attn_scalar**-0.5,
    final_cap=of("final_logit_softcapping"),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "qwen3_moe": dict(
        qk_norm=True,
        intermediate=of("moe_intermediate_size"),
        experts=of("num_experts"),
        experts_per_token=of("num_experts_per_tok"),
        experts_sum_to_one=of("norm_topk_prob"),
    ),
    "smollm3": dict(rotated=of("no_rope_layers")),
    "granite": dict(
        scale=of("attention_multiplier"),
        embedding_scale=of("embedding_multiplier"),
        residual_scale=of("residual_multiplier"),
        logit_divisor=of("logits_scaling"),
    ),
    "phi3": dict(joined=True, rotary_dim=_rotary_dim),
    "olmo2": OLMO,
    "olmo3": OLMO,
    "gemma2": GEMMA | dict(softcap=of("attn_logit_softcapping")),
    "gemma3_text": GEMMA | dict(qk_norm=True),
    "qwen3_5_text": dict(
        qk_norm=True,
        plus_one=True,
        gated=True,
        rotary_dim=_rotary_dim,
        delta=DeltaLayers.of,
    ),
}
