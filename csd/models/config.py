"""What the decoder needs to know of a model, and which models it can run."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from csd.models.foreign_fields import refuse_foreign_fields

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LLAMA3 = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
# rope types, and what each reads; a context that was extended is no part of the default's
_ROPE = {
    "default": _LLAMA3[-1:],
    "llama3": _LLAMA3,
    "linear": ("factor", _LLAMA3[-1]),
    "yarn": (
        "factor", _LLAMA3[-1], "attention_factor", "mscale", "mscale_all_dim", "beta_fast",
        "beta_slow", "truncate",
    ),
}  # fmt: skip
SUPPORTED = "supported are Llama 2/3, Mistral, Qwen2/2.5 and Qwen3 (dense)"


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
    rope_type: str = "default"  # frequencies of "linear" and "yarn" are the module's
    rope_attention: float = 1.0  # cosines and sines are multiplied by it
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
        theta, scaling, kind, attention = _rope(config)
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
            rope_type=kind,
            rope_attention=attention,
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


def _rope(config: Any) -> tuple[float, tuple | None, str, float]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_type" not in rope or "rope_theta" not in rope:
        raise ValueError(
            f"rope_parameters need rope_type and rope_theta for all layers, got {rope}"
        )
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind not in _ROPE:
        known = ", ".join(map(repr, _ROPE))
        raise ValueError(f"rope type {kind!r} is not supported, only {known}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    for name in sorted(rope.keys() - {"rope_type", "type", "rope_theta", *_ROPE[kind]}):
        if rope[name] not in (None, 1):
            raise ValueError(
                f"rope_parameters with {name}={rope[name]!r} are not supported for {kind!r}"
            )
    attention = _yarn_attention(rope) if kind == "yarn" else 1.0
    if kind != "llama3":
        return theta, None, kind, attention
    factor, low, high, old = (rope[name] for name in _LLAMA3)
    return theta, (float(factor), float(low), float(high), int(old)), "default", attention


def _yarn_attention(rope: dict) -> float:
    """By what YaRN multiplies cosines and sines."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def of(weight: float) -> float:
        factor = rope["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    return float(of(both[0]) / of(both[1])) if both[0] and both[1] else of(1)
