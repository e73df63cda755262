"""Fields of a `transformers` config that rule out the fused decoder."""

from typing import Any

from csd.models.rope_config import FULL, LOCAL

# families in which a window applies to all layers, whatever their layer_types are
ALL_LOCAL = ("mistral", "phi3", "qwen3_moe")
SUPPORTED = (
    "supported are Llama 2/3, Mistral, Qwen2/2.5, Qwen3 (dense and experts), Qwen3.5 (dense), "
    "SmolLM3, Granite 3, Phi-3/4, OLMo 2/3 and Gemma 2/3"
)


def rotated_layers(layers: Any, attention: float) -> tuple[bool, ...] | None:
    """Per layer, whether it has a rotary embedding; None if all have."""
    found = tuple(map(bool, layers))
    if all(found):
        return None
    if attention != 1:
        raise ValueError(
            "layers without rotary embedding are not supported together with a rotary embedding "
            f"that multiplies by {attention}"
        )
    return found


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
