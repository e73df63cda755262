"""Opening of files in folders that others may write to, such as caches, locks and temporary files.

Another user may have put a link, a pipe or a file there: a link that is followed would let this
process empty the file of its own user that it leads to, and a pipe would block it.
"""

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path


def open_regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Descriptor of a regular file, which is not truncated; no link is followed. Raises OSError."""
    # a pipe is opened at once, and refused below
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags | safe, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise _refusal(path, "is a link or a pipe, not a regular file") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _refusal(path, "is not a regular file")
    except BaseException:
        os.close(file)
        raise
    return file


def open_own(
    path: str | Path, flags: int, mode: int = 0o600, owners: Collection[int | None] = ()
) -> int:
    """Descriptor of a regular file of this user, of root or of `owners`, which no other can write.

    Raises OSError, which names the file, for another one.
    """
    file = open_regular(path, flags, mode)
    try:
        check_own(path, os.fstat(file), owners)
    except BaseException:
        os.close(file)
        raise
    return file


def check_own(
    path: str | Path, status: os.stat_result, owners: Collection[int | None] = ()
) -> None:
    """Raises OSError unless a file or folder is this user's, root's or one of `owners`', and no
    other user can write to it."""
    if status.st_uid not in {0, os.geteuid(), *owners}:
        raise _refusal(path, f"belongs to user {status.st_uid}: remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, f"can be written by other users: chmod go-w {path}")


def own_folder(path: Path) -> None:
    """Make a folder that only this user may enter, or check an existing one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        # a link must be this user's too
        link, status = os.lstat(path), os.stat(path)
        if link.st_uid not in (0, os.geteuid()):
            raise _refusal(path, f"belongs to user {link.st_uid}: remove it") from None
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
            # made before, or by a tool with another umask
            os.chmod(path, 0o700)
        else:
            check_own(path, status)


def _refusal(path: str | Path, reason: str) -> OSError:
    return PermissionError(errno.EPERM, f"not used, because it {reason}", str(path))
