"""Fields of a `transformers` config that rule out the fused decoder."""

from typing import Any

# windows of these are not switched on by a field of their own
WINDOWED = ("mistral", "phi3")
SUPPORTED = (
    "supported are Llama 2/3, Mistral, Qwen2/2.5, Qwen3 (dense and experts), SmolLM3, Granite 3, "
    "Phi-4 and OLMo 2"
)


def rotated_layers(layers: Any, attention: float) -> tuple[bool, ...] | None:
    """Flags of the layers that have a rotary embedding; None where all have."""
    found = tuple(map(bool, layers))
    if all(found):
        return None
    if attention != 1:
        raise ValueError(
            "layers without rotary embedding are not supported beside a rotary embedding that "
            f"multiplies by {attention}"
        )
    return found


def refuse_dense_layers(config: Any) -> None:
    """Raises ValueError for layers without experts among those with them."""
    dense = getattr(config, "mlp_only_layers", None)
    if dense or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"layers without experts (mlp_only_layers={dense}, decoder_sparse_step="
            f"{config.decoder_sparse_step}) are not supported among those with them; {SUPPORTED}"
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
    """Raises ValueError for a field of another value."""
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported, only {allowed[0]!r}; {SUPPORTED}")


def refuse_window(config: Any) -> None:
    """Raises ValueError for a sliding window that is in use and shorter than the context."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        other = sorted(set(types) - {"full_attention", "sliding_attention"})
        if other:
            raise ValueError(f"layer_types of {other[0]!r} are not supported; {SUPPORTED}")
        used = "sliding_attention" in types
    elif config.model_type in WINDOWED:
        used = True
    else:
        used = bool(getattr(config, "use_sliding_window", False))
    window = getattr(config, "sliding_window", None)
    if used and window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"sliding_window={window} is in use, which is not supported; set it to None if prompts "
            f"and samples stay below {window} tokens"
        )
