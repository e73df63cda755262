"""Loops that numba compiles, and when what is kept of them is stale."""

import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event

from csd.cpu.kept import UNKEPT, Kept
from csd.state import phases

CSD = Path(__file__).parents[1]
# the loops, and where their constants are defined
ROOMS = ("cpu", "kernels", "state")


def _is_own(found: Any) -> bool:
    """Returns True for an event about a loop of csd's."""
    return (found.data["dispatcher"].py_func.__module__ or "").startswith("csd.")


class First(event.Listener):
    """Runs a function where the first of csd's loops is compiled, and not read from a file."""

    def __init__(self, run: Callable[[], None]):
        self.run, self.done = run, False

    def on_start(self, found: Any) -> None:
        if not self.done and _is_own(found):
            self.done = True
            self.run()

    def on_end(self, found: Any) -> None:
        pass


class Counted(event.Listener):
    """Counts the loops of csd that this process compiles, and the seconds that they take."""

    loops = 0

    def on_start(self, found: Any) -> None:
        if _is_own(found):
            phases.begin("compile")
            self.loops += 1
            phases.note(f"{self.loops} loops")

    def on_end(self, found: Any) -> None:
        if _is_own(found):
            phases.end()


def _log() -> None:
    if phases.is_shown():
        # the phase's own line shows it
        return
    logging.getLogger("csd").warning(
        "csd compiles loops for this CPU, which takes about a minute, once a machine"
    )


# once a process: its call waits
NOTICE = First(_log)
event.register("numba:compile", NOTICE)
event.register("numba:compile", Counted())


def before_compiling(run: Callable[[], None]) -> AbstractContextManager:
    """Within it, `run` is called before the first loop of csd is compiled, if one is."""
    return event.install_listener("numba:compile", First(run))


def loop(function: Any) -> Any:
    """`function` compiled at its first call, once for all processes, without Python's lock.

    Only what is indexed by the loop's own variable becomes vectors: an index that might be negative
    is taken from the end. So loops run over slices.
    """
    return compiled(function)


def any_order(function: Any) -> Any:
    """A `loop` whose sums the compiler may reorder; a length has one order."""
    return compiled(function, fastmath={"reassoc"})


def compiled(function: Any, **options: Any) -> Any:
    usual: dict[str, Any] = dict(nogil=True, error_model="numpy", boundscheck=False)
    options = usual | options
    found, file = njit(function, **options), Path(function.__code__.co_filename)
    try:
        # numba compiles a function again when its own file has changed, but code of other files,
        # and their constants, are in it too
        found._cache = Kept(function, stamp(file) if file.is_file() else None)
    except RuntimeError as error:
        # neither the package's folder nor the user's can be written
        UNKEPT(error)
    return found


@cache
def stamp(file: Path) -> str:
    """A digest of `file` and of all sources whose code or constants csd's loops may contain."""
    return hashlib.sha256(file.read_bytes() + _sources()).hexdigest()


@cache
def _sources() -> bytes:
    files = sorted(path for room in ROOMS for path in (CSD / room).rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).digest()
