"""The device an engine works on: what is current while it launches, and what it is sent."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block, launches, streams and graphs are those of `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """The same items; `device` is current while they are made, and not while they are used."""
    items = iter(items)
    try:
        while True:
            with current(device):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            with current(device):
                close()


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`. The host does not wait for what the device has still to do."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
