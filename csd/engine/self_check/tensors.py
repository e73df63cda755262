"""Tensors inside an operation's arguments and results."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def mapped(x: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`x` with `move` applied to every tensor, also in dataclasses, tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return move(x)
    if is_dataclass(x) and not isinstance(x, type):
        moved = {f.name: mapped(getattr(x, f.name), move) for f in fields(x)}
        return type(x)(**moved)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(mapped(y, move) for y in x))
    if isinstance(x, tuple | list):
        return type(x)(mapped(y, move) for y in x)
    return {k: mapped(y, move) for k, y in x.items()} if isinstance(x, dict) else x


def to_cpu(x: torch.Tensor) -> torch.Tensor:
    # copy=True: a copy with the same strides, also if the tensor is on the CPU
    return x.detach().to("cpu", copy=True)


def to_double(x: torch.Tensor) -> torch.Tensor:
    """Copy of a CPU tensor; floats become float64."""
    return x.double() if x.is_floating_point() else x.clone()


def tensors(x: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(x, note)
    return found
