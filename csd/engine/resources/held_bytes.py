"""Bytes of the tensors that an object holds: an engine's weights, caches and tables."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from csd.kernels.layers.quantized import stored

CONTAINERS = (list, tuple, set, frozenset)


def held_bytes(root: Any) -> int:
    """Bytes of all storages of tensors that csd's objects and modules under `root` refer to."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    # the objects are kept, so that no identity is used twice
    waiting, visited = [root], []
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        visited.append(x)
        if isinstance(x, torch.Tensor):
            for part in stored(x):
                if part.layout == torch.strided:
                    storage = part.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
                else:
                    # packed weights have no storage that can be read
                    storages[id(part)] = part.numel() * part.element_size()
        else:
            waiting += _parts(x)
    return sum(storages.values())


def _parts(x: Any) -> Iterator[Any]:
    if isinstance(x, torch.nn.Module):
        yield from x.parameters()
        yield from x.buffers()
    elif isinstance(x, Mapping):
        yield from x.values()
    elif isinstance(x, CONTAINERS):
        yield from x
    elif isinstance(x, partial):
        yield from (x.func, x.args, x.keywords)
    elif hasattr(x, "__self__"):
        # a bound method
        yield x.__self__
    elif not isinstance(x, type) and type(x).__module__.startswith("csd."):
        yield getattr(x, "__dict__", {})
        for kind in type(x).__mro__:
            for name in getattr(kind, "__slots__", ()):
                yield getattr(x, name, None)
