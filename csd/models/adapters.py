"""Adapters of the package peft: which of a module's are at work.

peft is not imported. Its layers are found by their base class's name, and what they do in a pass is
decided by attributes of theirs, so a training step is in the next pass, and a pass can have the
adapters that were active earlier.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

# one holds a layer's adapters, the other copies of a layer that are trained whole
LAYERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper")
GONE = (
    "adapters were merged or removed while samples were drawn, whose keys and values are of the "
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


T = TypeVar("T")

# of a layer, in place: what is active, and whether all are off
_SWITCHES = ("_active_adapter", "_disable_adapters")


class Adapters:
    """The adapters of a module that were active when a call began, for all of its passes."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._layers = tuner_layers(modules)
        self.begin()

    def begin(self) -> None:
        """The passes to come are of the adapters that are active now."""
        settle(self._layers)
        self.state = self.now()
        self._switches = [_switches(layer) for layer in self._layers]
        self._there = [_present(layer) for layer in self._layers]

    def now(self) -> tuple:
        return state_of(self._layers)

    def run(self, once: Callable[[], T]) -> T:
        """Result of `once` with these adapters; a pass in which another thread switches is redone.

        Raises RuntimeError where they are no longer there.
        """
        while True:
            with self._as_they_were():
                found = once()
                if self.now() == self.state:
                    return found

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
                # what was switched meanwhile is newer
                if _switches(layer) == own:
                    vars(layer).update(switches)


def _switches(layer: Any) -> dict[str, Any]:
    # a list is changed in place
    found = {name: getattr(layer, name) for name in _SWITCHES if hasattr(layer, name)}
    return {name: [*x] if isinstance(x, list) else x for name, x in found.items()}


def _present(layer: Any) -> set[str]:
    """Active adapters that a layer has; layers may lack one that others have."""
    parts = getattr(layer, "adapter_layer_names", ())
    return {*layer.active_adapters} & {name for part in parts for name in getattr(layer, part, ())}


def base_of(model: Any) -> Any:
    """The transformers model within a PeftModel; another model is its own."""
    kinds = {c.__name__ for c in type(model).__mro__}
    return model.get_base_model() if "PeftModel" in kinds else model
