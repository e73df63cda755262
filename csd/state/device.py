"""Device of an engine: the current device and stream of launches, and copies to it."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# CUDA's words for a device in compute-exclusive mode that another process holds
BUSY = "busy or unavailable"


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The caller's stream on `device`; a CPU has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def current(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> AbstractContextManager[Any]:
    """Make `device`, and `stream` if given, current within the block."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device) if stream is None else torch.cuda.stream(stream)


def on_device(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yield the items; `device` is current while they are computed, not while they are used.

    All are computed on the caller's stream at the first one.
    """
    items = iter(items)
    stream = stream_of(device)
    try:
        while True:
            with current(device, stream):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            with current(device, stream):
                close()


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    """Free memory of `device`, in bytes."""
    if device.type == "cuda":
        # torch reuses the memory of freed tensors that it has reserved
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device) -> int | None:
    """Peak bytes of torch on `device`, by `torch.cuda.max_memory_allocated`; None on a CPU.

    Since the process began, or since its user reset it.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
