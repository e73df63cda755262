"""Adapters of the package peft: which of a module's are at work.

peft is not imported. Its layers are known by their base class's name, and what they do in a pass is
decided by attributes of theirs, so a switch or a training step is in the next pass.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

# one holds a layer's adapters, the other copies of a layer that are trained whole
LAYERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper")
CHANGED = (
    "the model's adapters were changed while samples were drawn: their keys and values are of the "
    "adapters that were active when the call began"
)


def tuner_layers(modules: Iterable[nn.Module]) -> list[Any]:
    return [m for m in modules if any(c.__name__ in LAYERS for c in type(m).__mro__)]


def state_of(layers: list[Any]) -> tuple:
    """The adapters of each layer that are active, off, or merged into its weight."""
    return tuple(
        (
            tuple(layer.active_adapters),
            bool(getattr(layer, "disable_adapters", False)),
            tuple(getattr(layer, "merged_adapters", ())),
        )
        for layer in layers
    )


def settle(layers: list[Any]) -> None:
    """Take merged adapters that are off out of their weights, as peft does in a layer's pass."""
    for layer in layers:
        if getattr(layer, "disable_adapters", False) and getattr(layer, "merged", False):
            layer.unmerge()


def base_of(model: Any) -> Any:
    """The transformers model within a PeftModel; another model is its own."""
    kinds = {c.__name__ for c in type(model).__mro__}
    return model.get_base_model() if "PeftModel" in kinds else model
