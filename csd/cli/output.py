"""Standard output of a command: tried before a model draws, and replaced where it fails."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from csd.schema.write import try_writing


@contextmanager
def naming_output() -> Iterator[None]:
    """Name standard output in an OSError of the block, and discard further output."""
    try:
        yield
    except OSError as error:
        # what is still buffered would fail once more at the interpreter's end
        with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        raise OSError(error.errno, error.strerror, "standard output") from error


def check_output() -> None:
    """Raises OSError where standard output is closed, has no reader or is a full device."""
    with naming_output():
        if sys.stdout is None or sys.stdout.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            file = sys.stdout.fileno()
        except (OSError, ValueError):
            # an object that collects text, as of a notebook
            return
        try_writing(file)


def flush_output() -> None:
    """Raises OSError where what was printed cannot be written."""
    if sys.stdout is not None:
        with naming_output():
            sys.stdout.flush()


def show(text: str, suffix: str = ".txt") -> None:
    """Print a text that took long to make.

    Raises OSError where it cannot be printed, and names a file of the temporary folder that has it.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        with naming_output():
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        raise OSError(f"{error}; what was drawn is in {keep(text, suffix)}") from error


def keep(text: str, suffix: str) -> str:
    """Write a text to a new file of the temporary folder; returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="csd-", suffix=suffix, delete=False
    ) as file:
        file.write(text + "\n")
    return file.name
