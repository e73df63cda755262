"""Sizes of a module, from its config and its probe."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from csd.models.fused.config import ModelSizes
from csd.models.fused.rope import context_of
from csd.models.lora import base_of
from csd.models.module.probe import NotAdmitted, Probed
from csd.models.refuse import refuse_module
from csd.state.kv_cache import LayerShape
from csd.state.recurrent import ConvSize, StateSize, StateSizes

# context of models whose config names none
UNBOUNDED = 1 << 20


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """Sizes of a module. If calls differ, heads and head_dim are those of the widest call."""

    # the fields of NamedSizes, in its order
    family: str
    vocab: int
    hidden: int
    context: int
    layers: int  # of the cache: calls with their own keys and values
    heads: int
    kv_heads: int
    head_dim: int
    uniform: bool = True  # whether all calls have these heads
    shapes: tuple[LayerShape, ...] | None = None  # of the cache's layers, if they differ
    states: StateSizes | None = None  # of layers with a state in place of keys and values
    reach: int | None = None  # most keys that a row sees; None if a layer's rows see all

    @property
    def of_calls(self) -> tuple[int, int, int] | None:
        """Heads, key-value heads and head size of all calls; None if these differ."""
        return (self.heads, self.kv_heads, self.head_dim) if self.uniform else None


class NamedSizes(NamedTuple):
    """Sizes that a transformers config names."""

    family: str
    vocab: int
    hidden: int
    context: int

    @classmethod
    def of(cls, base: Any) -> "NamedSizes":
        """Sizes in the current config of a transformers model."""
        text = base.config.get_text_config()
        context = context_of(text) or UNBOUNDED
        family = getattr(text, "model_type", "") or type(base).__name__
        return cls(family, text.vocab_size, text.hidden_size, context)


def probed_sizes(named: NamedSizes, probed: Probed) -> ModuleConfig:
    """Sizes of a probed module. Raises NotAdmitted if logits and config differ in vocabulary."""
    if probed.vocab != named.vocab:
        raise NotAdmitted(
            f"{named.family} returns {probed.vocab} logits, but vocab_size of its config is "
            f"{named.vocab}: they must be equal"
        )
    own = {c.layer: c.spec for c in probed.calls if c.spec.shares is None}
    shapes = tuple(
        LayerShape(own[i].kv_heads, own[i].head_dim, own[i].value_dim) for i in sorted(own)
    )
    specs = [call.spec for call in probed.calls]
    sizes = {(spec.heads, spec.kv_heads, spec.head_dim) for spec in specs}
    uniform = len(sizes) == 1 and all(spec.head_dim == spec.value_dim for spec in specs)
    widest = max(specs, key=lambda spec: spec.width)
    heads = widest.heads, widest.kv_heads, widest.head_dim
    convs = tuple(call.size for call in probed.mixers if isinstance(call.size, ConvSize))
    states = tuple(call.size for call in probed.mixers if isinstance(call.size, StateSize))
    # at most one of window and chunk is set
    seen = [s.window if s.chunk is None else s.chunk for s in specs]
    return ModuleConfig(
        *named,
        len(shapes),
        *heads,
        uniform,
        None if uniform else shapes,
        StateSizes(convs, states) if probed.mixers else None,
        None if None in seen else max(filter(None, seen)),
    )


def current_sizes(model: Any, before: ModelSizes) -> ModuleConfig:
    """Current sizes of a module; before: its decoder's, for sizes that only a probe determines.

    Raises as `ModuleDecoder` does for properties of the config or module that csd does not run.
    """
    refuse_module(model)
    now = NamedSizes.of(base_of(model))
    # the fields of NamedSizes come first
    own: list[Any] = [getattr(before, f.name, f.default) for f in fields(ModuleConfig)[len(now) :]]
    return ModuleConfig(*now, *own)
