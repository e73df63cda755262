"""Progress lines on stderr about slow parts of a first call."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# what takes less is not mentioned, in seconds
LONG_ON_GPU, LONG_ON_CPU = 1.0, 10.0


@contextmanager
def phase(name: str, device: torch.device, announced: str = "") -> Iterator[None]:
    """Print the block's time if it is long. announced: a line to print before it."""
    start = time.perf_counter()
    if announced:
        print(f"csd: {announced}", file=sys.stderr, end=" ", flush=True)
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        if announced:
            print(f"{seconds:.1f} s", file=sys.stderr, flush=True)
        elif seconds > (LONG_ON_GPU if device.type == "cuda" else LONG_ON_CPU):
            print(f"csd: {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
