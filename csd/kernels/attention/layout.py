"""Places of every pool row's keys: operands of the attention that all layers share."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch

from csd.state.record import View, named, tensor

# rows of pool rows and query heads that a tile of the Triton kernel has
TILE = 64


@named
class TreeLayout(NamedTuple):
    """Prompts of G groups, committed tokens of S slots and nodes of M rows; absent pages are -1."""

    prompt_pages: torch.Tensor = tensor("G PP")
    prompt_len: torch.Tensor = tensor("G")
    slot_pages: torch.Tensor = tensor("S SP")
    slot_len: torch.Tensor = tensor("S")
    slot: torch.Tensor = tensor("M")
    ancestors: torch.Tensor = tensor("M", torch.int64)
    slot_start: torch.Tensor = tensor("S")
    slot_nodes: torch.Tensor = tensor("S")
    group_start: torch.Tensor = tensor("G+1")


LAYOUT = View(TreeLayout)
# fields that give the slot and group of every row, from which the work list is made
ROWS = View(TreeLayout, "prompt_len slot_len slot slot_start slot_nodes group_start")
# fields that only the attention reads
_PLACES = View(TreeLayout, "slot ancestors prompt_pages slot_pages")


class Work(NamedTuple):
    """A step's work list for the Triton kernel, made by `plan_attention`."""

    segment: torch.Tensor  # [W, 6] int32
    program: torch.Tensor  # [programs, 2] int32
    merge: torch.Tensor  # [M, 4] int32
    # with a window or a chunk
    first: torch.Tensor | None = None  # [M, 2] int32
    seen: torch.Tensor | None = None  # [M] int64


def check_rows(layout: Any, device: torch.device, sizes: dict[str, int] | None = None) -> None:
    """Raises ValueError unless the fields of ROWS fit each other. sizes: as in `View.check`."""
    ROWS.check(layout, sizes if sizes is not None else {}, device, prefix="")


def check_layout(layout: Any, rows: int, device: torch.device) -> None:
    """Raises ValueError unless `layout` fits a pool of `rows` rows."""
    sizes: dict[str, int] = {}
    check_rows(layout, device, sizes)
    _PLACES.check(layout, sizes | {"M": rows}, device, prefix="")


def check_reach(window: int | None, chunk: int | None) -> None:
    """Raises ValueError unless both are None or positive."""
    for name, tokens in (("window", window), ("chunk", chunk)):
        if tokens is not None and not tokens > 0:
            raise ValueError(f"{name} must be positive or None, got {tokens}")


def with_layout(function: Callable) -> Callable:
    """Wraps a function that takes a TreeLayout so that it takes the layout's tensors by name."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        tensors = {name: named.pop(name) for name in TreeLayout._fields}
        return function(*args, layout=TreeLayout(**tensors), **named)

    return call
