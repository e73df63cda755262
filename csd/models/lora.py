"""LoRA layers of the package peft: base layers, working adapters, and refusal of other kinds.

peft is not imported: a layer is recognised by its class's name.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


def is_lora(module: Any) -> bool:
    """True if a module is exactly peft's LoRA of a linear layer, not a class derived from it."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("peft.tuners.lora.layer", "Linear")


def base_linear(module: Any) -> Any:
    """The layer that has the weight: a LoRA's base layer, or any other module itself."""
    return module.base_layer if is_lora(module) else module


def without_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of a model as if it had no LoRA."""
    within: str | None = None
    for name, module in model.named_modules():
        if within is not None and name.startswith(within):
            continue
        yield name, base_linear(module)
        within = f"{name}." if is_lora(module) else None


def working(layer: Any) -> list[str]:
    """Adapters that a LoRA adds to its base layer, in the order of addition."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def refuse_lora(name: str, layer: Any) -> None:
    """Raises TypeError, with the reason, if a working adapter is more than two products."""
    if type(layer.base_layer) is not nn.Linear:
        kind = type(layer.base_layer).__name__
        raise TypeError(f"{name} is a LoRA of a {kind}, which the fused decoder does not compute")
    for adapter in working(layer):
        parts = layer.lora_A[adapter], layer.lora_B[adapter]
        variant = layer.lora_variant.get(adapter)
        weights = [part.weight for part in parts if type(part) is nn.Linear]
        kinds = {weight.dtype for weight in weights}
        why = None
        if variant is not None:
            why = f"is a {type(variant).__name__.removesuffix('LinearVariant')}"
        elif len(weights) < 2:
            why = "has other matrices than lora_A and lora_B"
        elif any(part.bias is not None for part in parts):
            why = "has a bias (lora_bias)"
        elif layer.fan_in_fan_out:
            why = "has fan_in_fan_out"
        elif not all(kind.is_floating_point for kind in kinds) or len(kinds) > 1:
            why = "has A and B in two dtypes, or quantised"
        elif not getattr(layer, "cast_input_dtype_enabled", True):
            why = "does not cast its input"
        elif any(weight.device != layer.base_layer.weight.device for weight in weights):
            why = "is on another device than its base layer"
        if why is not None:
            raise TypeError(
                f"the adapter {adapter!r} of {name} {why}, which csd's fused decoder does not "
                "support"
            )
