"""Small files cached across processes, in $XDG_CACHE_HOME/csd, by default ~/.cache/csd."""

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


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

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        # some file systems have no locks, and Windows has no fcntl
        except (ImportError, OSError):
            pass
        yield


def save(path: Path, text: str) -> None:
    """Writes a file atomically; several processes may do so at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{uuid.uuid4().hex[:12]}")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
