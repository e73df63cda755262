"""Types of a decoder's weights, and their bytes that a step reads."""

from typing import Any, NamedTuple

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.models.fused.decoder import PRODUCTS, Decoder
from csd.utils.device import as_size


class Held(NamedTuple):
    """Types of the matrices, the one with the most bytes first, and the bytes that a step of one
    row reads: all matrices but the embedding's, and of experts those of one token."""

    kinds: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{', '.join(self.kinds)}, {as_size(self.bytes)} a step"


def held_weights(decoder: Any) -> Held | None:
    """The weights of csd's fused decoder; None for another one."""
    if not isinstance(decoder, Decoder):
        return None
    sizes: dict[str, float] = {}
    for layer in decoder.layers:
        for name in PRODUCTS:
            _add(sizes, getattr(layer, name))
        if layer.experts is not None:
            _add(sizes, layer.experts.router)
            share = layer.experts.per_token, len(layer.experts.router)
            for weight in (layer.experts.gate_up, layer.experts.down):
                _add(sizes, weight, *share)
    _add(sizes, decoder.head)
    return Held(tuple(sorted(sizes, key=lambda kind: -sizes[kind])), round(sum(sizes.values())))


def _add(sizes: dict[str, float], weight: Any, used: int = 1, of: int = 1) -> None:
    """Add the bytes of a weight, or of `used` of its `of` experts, to those of its types."""
    if weight is None:
        return
    if isinstance(weight, Quantized | QuantizedStack):
        matrices = weight.matrices if isinstance(weight, QuantizedStack) else [weight]
        parts = [(part.format, part.data.numel()) for w in matrices for part in w.parts]
    else:
        kind = str(weight.dtype).removeprefix("torch.")
        parts = [(kind, weight.numel() * weight.dtype.itemsize)]
    for kind, size in parts:
        sizes[kind] = sizes.get(kind, 0) + size * used / of
