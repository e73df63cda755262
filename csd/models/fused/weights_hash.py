"""The hash of a decoder's tensors, which does not depend on the layout that this CPU multiplies."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.models.fused.decoder import Decoder, Layer
from csd.models.fused.linear import by_rows

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


def _parts(x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(x, Quantized | QuantizedStack):
        for matrix in x.matrices if isinstance(x, QuantizedStack) else [x]:
            for part in matrix.parts:
                yield f"{part.format} {part.rows}", part.data
        return
    yield str(x.dtype), by_rows(x)
