"""Small files cached across processes, in $XDG_CACHE_HOME/csd, by default ~/.cache/csd.

Others may write to the folder above, as where several users' $XDG_CACHE_HOME is in /tmp. So `csd`
is a folder of this user alone, and links, pipes and files of other users are not opened.

Locks within a process are replaced after a fork (`watch_forks`): a child has only the forking
thread, so other threads' locks stay held.
"""

import hashlib
import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from csd.utils.files import MAX_LINE, open_own, own_folder


def path_of(kind: str, key: str) -> Path:
    """Path of a key's file. Raises RuntimeError for a user without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "csd"
    return folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Context that one process at a time enters, per path; all at once if no file can be locked.

    The lock file is not removed: else two processes could lock two files of its name.
    """
    with ExitStack() as stack:
        try:
            import fcntl

            own_folder(path.parent)
            file = open_own(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        # some file systems have no locks, and Windows has no fcntl
        except (ImportError, OSError):
            pass
        yield


def read(path: Path) -> bytes:
    """Content of a cached file. Raises OSError if there is none, or one that may be another's."""
    # a folder that does not exist has no files
    if path.parent.exists():
        own_folder(path.parent)
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read(MAX_LINE + 1)


def holds(path: Path, text: str) -> bool:
    """True if the file has this text, and not a part of it or another one."""
    try:
        return read(path) == text.encode()
    except OSError:
        return False


def save(path: Path, text: str) -> None:
    """Writes a file atomically; several processes may do so at once. Raises OSError."""
    own_folder(path.parent)
    fresh = path.with_suffix(f".{uuid.uuid4().hex[:12]}")
    try:
        with open(open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(text)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


class Forked(Protocol):
    """An object with locks, of which a child gets a copy."""

    def after_fork(self) -> None:
        """Replace locks in the child that other threads may have held."""


_objects: "weakref.WeakSet[Forked]" = weakref.WeakSet()


def watch_forks(x: Forked) -> None:
    """Call `x.after_fork` in each child that is forked while `x` lives."""
    _objects.add(x)


def _in_child() -> None:
    objects = list(_objects)
    if objects:
        # GNU's OpenMP waits in a child for threads of the parent
        torch.set_num_threads(1)
    for x in objects:
        x.after_fork()


os.register_at_fork(after_in_child=_in_child)
