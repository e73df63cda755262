"""Slow parts of a first call: their seconds by kind, and progress lines on stderr."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# what takes less is not mentioned unless lines are shown, in seconds
LONG_ON_GPU, LONG_ON_CPU = 1.0, 10.0
# what is no sampling
KINDS = ("compile", "measure")


class _Here(threading.local):
    """State of this thread."""

    def __init__(self) -> None:
        self.shown = False  # whether phases are printed as they begin
        self.line = ""  # the line that is being printed
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.open: list[list] = []  # the kinds that run, outermost first, with their last begin


_here = _Here()


def wants_progress(progress: bool | None) -> bool:
    """None asks for it on a terminal."""
    return sys.stderr is not None and sys.stderr.isatty() if progress is None else progress


@contextmanager
def showing(progress: bool | None) -> Iterator[None]:
    """Within it, each phase of this thread prints a line as it begins."""
    before, _here.shown = _here.shown, wants_progress(progress)
    try:
        yield
    finally:
        _here.shown = before


def is_shown() -> bool:
    """Whether this thread's phases print lines as they begin."""
    return _here.shown


def preparation() -> dict[str, float]:
    """Seconds that this thread has spent so far, by KINDS."""
    return dict(_here.seconds)


def begin(kind: str) -> None:
    """From here on time counts as `kind`, until `end`; what it stands in does not go on."""
    now = time.perf_counter()
    if _here.open:
        outer = _here.open[-1]
        _here.seconds[outer[0]] += now - outer[1]
    _here.open.append([kind, now])


def end() -> None:
    """End what `begin` began last."""
    now = time.perf_counter()
    kind, since = _here.open.pop()
    _here.seconds[kind] += now - since
    if _here.open:
        _here.open[-1][1] = now


def note(text: str) -> None:
    """Add a text to the line of the phase that runs, in place of the last one."""
    if _here.line and sys.stderr.isatty():
        print(f"\r{_here.line} {text}", file=sys.stderr, end=" ", flush=True)


@contextmanager
def phase(
    name: str, device: torch.device | None, announced: str = "", kind: str = ""
) -> Iterator[None]:
    """Print the block's time if it is long.

    device: None is for what is printed only where lines are shown. announced: a line to print
    before the block. kind: counts the block's time as this one of KINDS.
    """
    start = time.perf_counter()
    if kind:
        begin(kind)
    line = announced or (name if _here.shown and not _here.line else "")
    if line:
        _here.line = f"csd: {line}"
        print(_here.line, file=sys.stderr, end=" ", flush=True)
    try:
        yield
    finally:
        if kind:
            end()
        seconds = time.perf_counter() - start
        if line:
            _here.line = ""
            print(f"{seconds:.1f} s", file=sys.stderr, flush=True)
        elif device is not None and seconds > _long(device):
            print(f"csd: {name}: {seconds:.1f} s", file=sys.stderr, flush=True)


def _long(device: torch.device) -> float:
    return LONG_ON_GPU if device.type == "cuda" else LONG_ON_CPU
