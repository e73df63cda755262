"""Everything that a pass of a model may read beside its text: tensors, numbers, flags and names.

A module's code may read any of its attributes, and no list of their names is complete. So all
attributes of the modules that run are taken, and of the configs, dictionaries and records that they
hold. Left out are functions' contents, objects of other kinds, and names that a pass does not read
or sets itself (`SET`).
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from csd.kernels.layers.quantized import stored
from csd.utils.torch_state import version_of

# attributes that PyTorch gives each module; its tensors and modules are taken by themselves
_OF_TORCH = frozenset(vars(nn.Module()))
# fields of a config for outputs beside the logits, which a pass does not ask for
OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")
# attributes of a layer with adapters: the active ones, and whether all are disabled; a call has its
# own
SWITCHES = ("_active_adapter", "_disable_adapters")
# names that no pass of csd reads, or that it sets itself: trainers change these
SET = frozenset(
    (
        *OUTPUTS,
        *SWITCHES,
        "merged_adapters",
        "use_cache",
        "gradient_checkpointing",
        "warnings_issued",
        "generation_config",
        "_attn_implementation_internal",
    )
)
# entries of a collection, and collections within each other, that are read; of others the number
MOST, DEEPEST = 4096, 8
_PLAIN: frozenset[type] = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
)


@dataclass(slots=True)
class Attributes:
    """Attributes of some objects; equal ones have equal `values` and `places`."""

    # names and values of each module's plain attributes
    values: list[tuple] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    _known: dict[int, int] = field(default_factory=dict)  # number of each config, by its id

    @classmethod
    def of(cls, modules: Iterable[nn.Module], without: Collection[str] = ()) -> "Attributes":
        """Read modules. without: names that are left out, as those in `SET`."""
        found, skipped = cls(), _OF_TORCH | SET | {*without}
        for module in modules:
            held = vars(module)
            # most modules of adapters have none of their own
            own = found.named(held, skipped) if len(held) > len(_OF_TORCH) else ()
            found.values.append(own)
            for tensors in (held["_parameters"], held["_buffers"]):
                if tensors:
                    there = [x for x in [*tensors.values()] if x is not None]
                    found.tensors += [part for x in there for part in stored(x)]
        return found

    @classmethod
    def of_object(cls, read: Any, without: Collection[str] = ()) -> "Attributes":
        """Read one object, and the records that it holds."""
        found = cls()
        found.values.append(found.named(vars(read), SET | {*without}))
        return found

    @property
    def places(self) -> tuple:
        """Address and version of each tensor.

        PyTorch counts a version up when it writes a tensor in place, but not for writes through
        `.data` or by foreign code.
        """
        return tuple((_address(x), version_of(x)) for x in self.tensors)

    def named(self, held: Mapping[str, Any], skipped: Collection[str] = SET) -> tuple:
        """Names and plain values of a mapping."""
        # a copy, since another thread may add a name
        items = [item for item in [*held.items()] if item[0] not in skipped]
        return tuple([(n, x if type(x) in _PLAIN else self.plain(x)) for n, x in items])

    def plain(self, value: Any, depth: int = 0) -> Hashable:
        """A value as a hashable one; `...` for objects of other kinds. Notes the tensors in it."""
        of: Any = type(value)
        kind = _kind_of(of)
        if kind in ("mapping", "list", "set") and (depth == DEEPEST or len(value) > MOST):
            return kind, len(value)
        match kind:
            case "plain":
                plain: Hashable = value
                return plain
            case "mapping":
                below, pairs = depth + 1, [*value.items()]
                return tuple([(self.plain(name), self.plain(x, below)) for name, x in pairs])
            case "list":
                return tuple([self.plain(x, depth + 1) for x in [*value]])
            case "set":
                return frozenset([self.plain(x, depth + 1) for x in [*value]])
            case "record":
                known = len(self._known)
                number = self._known.setdefault(id(value), known)
                return (number, self._record(value)) if number == known else number
            case "tensor":
                self.tensors += stored(value)
                return tuple(value.shape), value.dtype
            case "function":
                # a bound method is a new object at each access
                return id(getattr(value, "__func__", value))
        return ...

    def _record(self, value: Any) -> tuple:
        if is_dataclass(value) and not hasattr(value, "__dict__"):
            return self.named({f.name: getattr(value, f.name) for f in fields(value)})
        return self.named(vars(value))


_KINDS: dict[str, tuple[type, ...]] = {
    "other": (nn.Module, type),
    "tensor": (torch.Tensor,),
    "plain": (Number, str, bytes, Enum, *_PLAIN),
    "mapping": (Mapping,),
    "list": (list, tuple),
    "set": (set, frozenset),
    "function": (FunctionType, BuiltinFunctionType, MethodType),
}


@cache
def _kind_of(kind: type) -> str:
    """Name in `_KINDS` of a type; "record" for configs of transformers and for dataclasses."""
    for name, kinds in _KINDS.items():
        if issubclass(kind, kinds):
            return name
    of_transformers = {c.__name__ for c in kind.__mro__} & {"PretrainedConfig", "PreTrainedConfig"}
    return "record" if is_dataclass(kind) or of_transformers else "other"


def _address(x: torch.Tensor) -> int:
    return x.data_ptr() if x.layout == torch.strided else id(x)


def changed(before: Attributes, after: Attributes) -> set[str]:
    """Names of the plain attributes whose values differ; both are of the same modules."""
    pairs = zip(before.values, after.values, strict=True)
    return {name for x, y in pairs for name, _ in {*x} ^ {*y}}
