"""Adapters of the package peft in a module, and its LoRA layers for the fused decoder.

peft is not imported: its layers are recognised by the names of their classes, and their attributes
decide which adapters a pass applies. So a training step takes effect in the next pass, and a pass
can apply the adapters that were active earlier (`Adapters`). For the fused decoder a LoRA has a
base layer and working adapters; other kinds are refused.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from csd.models.attributes import SWITCHES, Attributes
from csd.models.text_model import unwrapped

# base classes of layers with adapters, and of wrappers with copies of a layer trained in full
LAYERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper")
GONE = (
    "adapters were merged or removed during sampling; the keys and values of these samples belong "
    "to the adapters that were active when the call began"
)


def tuner_layers(modules: Iterable[nn.Module]) -> list[Any]:
    return [m for m in modules if any(c.__name__ in LAYERS for c in type(m).__mro__)]


def state_of(layers: list[Any]) -> tuple:
    """Per layer: names of active adapters, whether all are disabled, names of merged ones."""
    return tuple(
        (
            tuple(layer.active_adapters),
            bool(getattr(layer, "disable_adapters", False)),
            tuple(getattr(layer, "merged_adapters", ())),
        )
        for layer in layers
    )


def settle(layers: list[Any]) -> None:
    """Unmerge disabled adapters from the weights in place, as peft does in a layer's forward."""
    for layer in layers:
        if getattr(layer, "disable_adapters", False) and getattr(layer, "merged", False):
            layer.unmerge()


T = TypeVar("T")


class Adapters:
    """Runs all passes of a call with the adapters that were active when the call began."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._layers = tuner_layers(modules)
        self.begin()

    def begin(self) -> None:
        """Use the adapters that are active now in all following passes."""
        settle(self._layers)
        self.state = self.now()
        # scales and other attributes, which a step recorded in a graph keeps
        self.values = Attributes.of(self._layers).values
        self._switches = [_switches(layer) for layer in self._layers]
        self._there = [_present(layer) for layer in self._layers]

    def now(self) -> tuple:
        return state_of(self._layers)

    def run(self, once: Callable[[], T]) -> T:
        """Result of `once()` with these adapters; repeated if another thread switches meanwhile.

        Raises RuntimeError if the adapters were merged or removed.
        """
        while True:
            with self._as_they_were():
                result = once()
                if self.now() == self.state:
                    return result

    @contextmanager
    def _as_they_were(self) -> Iterator[None]:
        if self.now() == self.state:
            yield
            return
        later = [_switches(layer) for layer in self._layers]
        for layer, switches in zip(self._layers, self._switches, strict=True):
            vars(layer).update(switches)
        if self.now() != self.state or [*map(_present, self._layers)] != self._there:
            for layer, switches in zip(self._layers, later, strict=True):
                vars(layer).update(switches)
            raise RuntimeError(GONE)
        try:
            yield
        finally:
            for layer, own, switches in zip(self._layers, self._switches, later, strict=True):
                # a switch made during the pass is newer, and stays
                if _switches(layer) == own:
                    vars(layer).update(switches)


def _switches(layer: Any) -> dict[str, Any]:
    # copies of lists, which peft changes in place
    switches = {name: getattr(layer, name) for name in SWITCHES if hasattr(layer, name)}
    return {name: [*x] if isinstance(x, list) else x for name, x in switches.items()}


def _present(layer: Any) -> set[str]:
    """Active adapters that exist in the layer; an adapter may exist in some layers only."""
    parts = getattr(layer, "adapter_layer_names", ())
    return {*layer.active_adapters} & {name for part in parts for name in getattr(layer, part, ())}


def base_of(model: Any) -> Any:
    """The transformers model inside a PeftModel and wrappers; another one is returned as it is."""
    model = unwrapped(model)
    kinds = {c.__name__ for c in type(model).__mro__}
    return unwrapped(model.get_base_model()) if "PeftModel" in kinds else model


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
