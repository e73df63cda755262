"""What the decoder needs to know of a model, and which models it can run."""

from dataclasses import dataclass
from typing import Any

from csd.models.foreign_fields import refuse_foreign_fields

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LLAMA3 = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
SUPPORTED = "supported are Llama 2/3, Mistral, Qwen2/2.5 and Qwen3 (dense)"

@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a Llama-like decoder."""

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
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    @classmethod
    def from_transformers(cls, config: Any) -> "ModelConfig":
        """Raises ValueError naming what the model has that csd does not run."""
        family = getattr(config, "model_type", None)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{family!r} is an encoder-decoder; csd runs decoders: {SUPPORTED}")
        if family not in FAMILIES:
            raise ValueError(f"model type {family!r} is not supported; {SUPPORTED}")
        if not _dequantised(getattr(config, "quantization_config", None)):
            raise ValueError(
                "quantised weights are not supported; load the model in bfloat16, float16 or "
                "float32 (a GGUF file is dequantised when loaded)"
            )
        _refuse(config, "hidden_act", ("silu",))
        _refuse(config, "mlp_bias", (False, None))
        if family != "qwen2":
            _refuse(config, "attention_bias", (False, None))
        refuse_foreign_fields(config, SUPPORTED)
        if getattr(config, "pretraining_tp", 1) not in (1, None):
            raise ValueError("pretraining_tp must be 1")
        _no_window(config)
        heads = config.num_attention_heads
        theta, scaling = _rope(config)
        return cls(
            family=family,
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            context=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied=bool(config.tie_word_embeddings),
        )


def _dequantised(quantization: Any) -> bool:
    # transformers leaves a mark on models from GGUF files, whose weights it has dequantised
    if quantization is None:
        return True
    method = getattr(quantization, "quant_method", None)
    if isinstance(quantization, dict):
        method = quantization.get("quant_method")
    return str(getattr(method, "value", method)).lower() == "gguf"


def _refuse(config: Any, name: str, allowed: tuple) -> None:
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported, only {allowed[0]!r}; {SUPPORTED}")


def _no_window(config: Any) -> None:
    """A sliding window matters only where it is in use and shorter than the context."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        other = sorted(set(types) - {"full_attention", "sliding_attention"})
        if other:
            raise ValueError(f"layer_types of {other[0]!r} are not supported; {SUPPORTED}")
        used = "sliding_attention" in types
    elif config.model_type == "mistral":
        used = True
    else:
        used = bool(getattr(config, "use_sliding_window", False))
    window = getattr(config, "sliding_window", None)
    if used and window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"sliding_window={window} is in use, which is not supported; set it to None if prompts "
            f"and samples stay below {window} tokens"
        )


def _rope(config: Any) -> tuple[float, tuple | None]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_type" not in rope or "rope_theta" not in rope:
        raise ValueError(
            f"rope_parameters need rope_type and rope_theta for all layers, got {rope}"
        )
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported, only 'default' and 'llama3'")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    # a context that was extended is no part of the default's computation
    used = _LLAMA3 if kind == "llama3" else _LLAMA3[-1:]
    for name in sorted(rope.keys() - {"rope_type", "type", "rope_theta", *used}):
        if rope[name] not in (None, 1):
            raise ValueError(
                f"rope_parameters with {name}={rope[name]!r} are not supported for {kind!r}"
            )
    if kind == "default":
        return theta, None
    factor, low, high, old = (rope[name] for name in _LLAMA3)
    return theta, (float(factor), float(low), float(high), int(old))
