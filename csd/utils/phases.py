"""Slow parts of a first call: their seconds by kind, and progress lines on stderr.

On a terminal a phase has one line, which grows. Elsewhere, as in a log, each line is whole when it
is written: one as the phase begins, one with its seconds, and some of its progress between them.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# seconds below which a phase is not printed, unless lines are shown
LONG_ON_GPU, LONG_ON_CPU = 1.0, 10.0
# kinds of time that is not sampling
KINDS = ("compile", "measure")
# seconds between lines of progress where there is no terminal
EVERY = 10.0


class _Here(threading.local):
    """State of this thread."""

    def __init__(self) -> None:
        self.shown = False  # whether phases are printed as they begin
        self.line = ""  # the line that is being printed
        self.noted = 0.0  # time of the last line of progress
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.open: list[list] = []  # kinds that are running, outermost first, and since when


_here = _Here()


def wants_progress(progress: bool | None) -> bool:
    """Returns `progress`; if it is None, True on a terminal, in IPython and in a notebook."""
    return _on_terminal() or _in_ipython() if progress is None else progress


@contextmanager
def showing(progress: bool | None) -> Iterator[None]:
    """Context in which each phase of this thread prints a line as it begins."""
    before, _here.shown = _here.shown, wants_progress(progress)
    try:
        yield
    finally:
        _here.shown = before


def is_shown() -> bool:
    """Returns True if this thread's phases print lines as they begin."""
    return _here.shown


def preparation() -> dict[str, float]:
    """Seconds that this thread has spent so far, by KINDS."""
    return dict(_here.seconds)


def begin(kind: str) -> None:
    """Counts the time until `end` as `kind`, and not as the kind that is running now."""
    now = time.perf_counter()
    if _here.open:
        outer = _here.open[-1]
        _here.seconds[outer[0]] += now - outer[1]
    _here.open.append([kind, now])


def end() -> None:
    """Ends the kind that `begin` began last."""
    now = time.perf_counter()
    kind, since = _here.open.pop()
    _here.seconds[kind] += now - since
    if _here.open:
        _here.open[-1][1] = now


def note(text: str) -> None:
    """Adds a text to the line of the running phase, in place of the last text."""
    if not _here.line:
        return
    if _on_terminal():
        print(f"\r{_here.line}: {text}", file=sys.stderr, end=" ", flush=True)
    elif time.perf_counter() - _here.noted > EVERY:
        _here.noted = time.perf_counter()
        print(f"{_here.line}: {text} ...", file=sys.stderr, flush=True)


@contextmanager
def phase(
    name: str, device: torch.device | None, announced: str = "", kind: str = ""
) -> Iterator[None]:
    """Prints the block's time if it is long.

    device: None prints the time only if lines are shown. announced: a line to print before the
    block. kind: one of KINDS, as which the block's time is counted.
    """
    start = time.perf_counter()
    if kind:
        begin(kind)
    line = announced or (name if _here.shown and not _here.line else "")
    if line:
        _here.line, _here.noted = f"csd: {line}", start
        on_terminal = _on_terminal()
        begins = f"{_here.line}: " if on_terminal else f"{_here.line} ...\n"
        print(begins, file=sys.stderr, end="", flush=True)
    try:
        yield
    finally:
        if kind:
            end()
        seconds = time.perf_counter() - start
        if line:
            ends = f"{seconds:.1f} s" if on_terminal else f"{_here.line}: {seconds:.1f} s"
            _here.line = ""
            print(ends, file=sys.stderr, flush=True)
        elif device is not None and seconds > _long(device):
            print(f"csd: {name}: {seconds:.1f} s", file=sys.stderr, flush=True)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _in_ipython() -> bool:
    """Returns True if an interactive shell of IPython runs, such as a notebook's kernel.

    IPython is not imported: a process without it has no such shell.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return sys.stderr is not None and shell is not None and shell() is not None


def _long(device: torch.device) -> float:
    return LONG_ON_GPU if device.type == "cuda" else LONG_ON_CPU
