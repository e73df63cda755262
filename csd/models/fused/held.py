"""Types of a decoder's weights, their bytes that a step reads, and the hash of its tensors."""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.models.fused.decoder import PRODUCTS, Decoder, Layer
from csd.models.fused.linear import by_rows
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
        parts = [(part.format, part.data.numel()) for part in _parts_in_file(weight)]
    else:
        kind = str(weight.dtype).removeprefix("torch.")
        parts = [(kind, weight.numel() * weight.dtype.itemsize)]
    for kind, size in parts:
        sizes[kind] = sizes.get(kind, 0) + size * used / of


# numbers of a tensor that are copied and hashed at once
AT_ONCE = 1 << 24


@torch.no_grad()
def weights_hash(decoder: Any) -> str | None:
    """sha256 of names, dtypes, shapes and bytes of all tensors that csd's decoder computes with.

    None for another decoder. A packed weight counts as the file has it, types and numbers.
    """
    if not isinstance(decoder, Decoder):
        return None
    digest = hashlib.sha256()
    for name, x in _tensors(decoder):
        for label, part in _parts(x):
            digest.update(f"{name} {label} {tuple(x.shape)};".encode())
            for block in part.flatten().split(AT_ONCE):
                digest.update(block.contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def _tensors(decoder: Decoder) -> Iterator[tuple[str, Any]]:
    yield "embedding", decoder.embedding
    for i, layer in enumerate(decoder.layers):
        for name in Layer.__dataclass_fields__:
            value = getattr(layer, name)
            if isinstance(value, torch.Tensor):
                yield f"{i}.{name}", value
            elif name in ("experts", "delta") and value is not None:
                held = [getattr(value, field) for field in value.__dataclass_fields__]
                held = [x for x in held if isinstance(x, torch.Tensor | QuantizedStack)]
                yield from ((f"{i}.{name}.{k}", x) for k, x in enumerate(held))
            elif name == "lora":
                stacks = [w for stack in value.values() for s in stack for w in s]
                yield from ((f"{i}.lora.{k}", x) for k, x in enumerate(stacks) if x is not None)
    yield "norm", decoder.norm
    yield "head", decoder.head


def _parts(x: Any) -> list[tuple[str, torch.Tensor]]:
    """Parts of a tensor, with a label of their type that does not depend on this CPU's layout."""
    if isinstance(x, Quantized | QuantizedStack):
        return [(f"{part.format} {part.rows}", part.data) for part in _parts_in_file(x)]
    return [(str(x.dtype), by_rows(x))]


def _parts_in_file(x: Quantized | QuantizedStack) -> list[Any]:
    matrices = x.matrices if isinstance(x, QuantizedStack) else [x]
    return [part for matrix in matrices for part in matrix.parts]
