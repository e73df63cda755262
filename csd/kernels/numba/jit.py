"""Decorators of numba-compiled loops, and the digest of sources that invalidates their cache."""

import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import event

from csd.kernels.numba.cache import UNKEPT, Kept
from csd.kernels.numba.dispatch import LoopDispatcher
from csd.utils import collector
from csd.utils import phases as preparation_phases

# the folder that `csd` is imported from
ROOT = Path(__file__).parents[3]
# imports of csd's modules: `from csd.a import b, c`, in parentheses or not, or `import csd.a`
IMPORTS = re.compile(
    rb"^[ \t]*(?:from (csd(?:\.\w+)*) import (\([^)]*\)|.*)|import (csd(?:\.\w+)*))", re.MULTILINE
)


def _is_own(data: Any) -> bool:
    """True if an event of numba's compiler is about one of csd's loops."""
    return (data.data["dispatcher"].py_func.__module__ or "").startswith("csd.")


class First(event.Listener):
    """Runs a function when the first of csd's loops is compiled instead of read from a file."""

    def __init__(self, run: Callable[[], None]):
        self.run, self.done = run, False

    def on_start(self, data: Any) -> None:
        if not self.done and _is_own(data):
            self.done = True
            self.run()

    def on_end(self, data: Any) -> None:
        pass


class Counted(event.Listener):
    """Counts csd's loops that this process compiles, and times them as the phase "compile".

    Python's garbage collector is paused meanwhile.
    """

    loops = 0

    def on_start(self, data: Any) -> None:
        if _is_own(data):
            collector.pause()
            preparation_phases.begin("compile")
            self.loops += 1
            preparation_phases.note(f"{self.loops} compiled")

    def on_end(self, data: Any) -> None:
        if _is_own(data):
            preparation_phases.end()
            collector.resume()


def _log() -> None:
    if preparation_phases.is_shown():
        # the phase's own line shows the compilation
        return
    logging.getLogger("csd").warning(
        "csd compiles kernels for this CPU, for any number of threads, and caches them: half a "
        "minute to two of CPU time for each dtype"
    )


# once per process, whose call waits
NOTICE = First(_log)
event.register("numba:compile", NOTICE)
event.register("numba:compile", Counted())


def before_compiling(run: Callable[[], None]) -> AbstractContextManager:
    """Context in which `run` is called before the first of csd's loops is compiled, if any."""
    return event.install_listener("numba:compile", First(run))


def loop(function: Any) -> Any:
    """Compile `function` at its first call, to run without the GIL; all processes share the code.

    Only accesses that are indexed by the loop's own variable are vectorized, since an index that
    might be negative counts from the end. So loops run over slices.
    """
    # no fast mathematics: the compiler reorders no sum and rounds each product
    options: dict[str, Any] = dict(
        nopython=True, nogil=True, error_model="numpy", boundscheck=False
    )
    dispatcher: Any = LoopDispatcher(function, targetoptions=options)
    file = Path(function.__code__.co_filename)
    try:
        # numba compiles a function again when its own file has changed, but the compiled code also
        # contains code and constants of other files
        dispatcher._cache = Kept(function, stamp(file) if file.is_file() else None)
    except RuntimeError as error:
        # neither the package's folder nor the user's is writable
        UNKEPT(error)
    return dispatcher


@cache
def stamp(file: Path) -> str:
    """Digest of `sources` of `file`."""
    texts = (path.read_bytes() for path in sorted(sources(file)))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def sources(file: Path) -> set[Path]:
    """`file` and what it imports of csd, directly or not: compiled loops contain their code."""
    found, unread = {file}, [file]
    while unread:
        new = _imported(unread.pop()) - found
        found |= new
        unread.extend(new)
    return found


@cache
def _imported(file: Path) -> set[Path]:
    """Files of the modules of csd that `file` names in its imports."""
    modules: set[str] = set()
    for package, names, module in IMPORTS.findall(file.read_bytes()):
        base = (package or module).decode()
        modules |= {base, *(f"{base}.{name}" for name in re.findall(r"\w+", names.decode()))}
    places = [ROOT.joinpath(*module.split(".")) for module in modules]
    files = [place.with_suffix(".py") for place in places]
    files += [place / "__init__.py" for place in places]
    return {path for path in files if path.is_file()}
