"""Pauses of Python's garbage collector, for work that makes millions of objects.

Loading a model by name and compiling loops make so many that the collector would search the objects
of torch and transformers again and again: about an eighth of a first call's CPU time.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace

# number of pauses that run, in all threads, and whether the collector ran before them
_pauses = SimpleNamespace(lock=Lock(), count=0, collects=False)


def _end_all() -> None:
    """End the pauses of threads that a fork leaves behind."""
    _pauses.lock = Lock()
    if _pauses.count and _pauses.collects:
        gc.enable()
    _pauses.count = 0


os.register_at_fork(after_in_child=_end_all)


def pause() -> None:
    """Begin a pause, until `resume`; pauses may overlap."""
    with _pauses.lock:
        if not _pauses.count:
            _pauses.collects = gc.isenabled()
            gc.disable()
        _pauses.count += 1


def resume() -> None:
    """End a pause; after the last one the collector runs again if it ran before the first."""
    with _pauses.lock:
        _pauses.count -= 1
        if not _pauses.count and _pauses.collects:
            gc.enable()


@contextmanager
def paused() -> Iterator[None]:
    """Context of a pause."""
    pause()
    try:
        yield
    finally:
        resume()
