"""Layers with a state in a fused decoder, read from a `transformers` config."""

from dataclasses import dataclass
from typing import Any

from csd.state.recurrent import ConvSize, StateSize, StateSizes


@dataclass(frozen=True, slots=True)
class DeltaLayers:
    """Flags of the layers that are gated delta nets, and the sizes of one."""

    layers: tuple[bool, ...]
    conv: ConvSize
    state: StateSize

    @classmethod
    def of(cls, config: Any) -> "DeltaLayers":
        """Read a `transformers` config. Raises ValueError for layers of other kinds."""
        kinds = {"linear_attention": True, "full_attention": False}
        other = sorted(set(config.layer_types) - set(kinds))
        if other:
            raise ValueError(f"layer_types of {other[0]!r} are not supported")
        layers = tuple(kinds[kind] for kind in config.layer_types)
        if all(layers):
            raise ValueError("layer_types without 'full_attention' are not supported")
        size = StateSize(
            config.linear_num_key_heads, config.linear_num_value_heads,
            config.linear_key_head_dim, config.linear_value_head_dim,
        )  # fmt: skip
        channels = 2 * size.key_heads * size.key_dim + size.heads * size.value_dim
        return cls(layers, ConvSize(channels, config.linear_conv_kernel_dim), size)

    @property
    def sizes(self) -> StateSizes:
        count = sum(self.layers)
        return StateSizes((self.conv,) * count, (self.state,) * count)
