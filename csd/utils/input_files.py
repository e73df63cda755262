"""Opening of files to read, whose names and contents may be another's."""

import errno
import os
import stat
from pathlib import Path
from typing import IO


def open_input(path: str | Path) -> IO[bytes]:
    """Open a file, device or pipe to read.

    A pipe that no process has opened to write would block for ever, and is refused.

    Raises OSError, which names the file, and ValueError for such a pipe.
    """
    # opening a pipe for reading does not wait for its writer
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        os.set_blocking(number, True)
        file = os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
    try:
        # waits if a writer has opened the pipe, and has written nothing yet
        if stat.S_ISFIFO(mode) and not file.peek(1):
            raise ValueError(f"{os.fspath(path)} is a pipe that no process writes to")
    except BaseException:
        file.close()
        raise
    return file


def check_no_pipes(folder: str | Path) -> None:
    """Raises ValueError for a folder with a pipe, a socket or a device, which libraries would wait
    for."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                mode = entry.stat().st_mode
            # a link that leads nowhere is the error of whoever reads it
            except OSError:
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{entry.path} must be a regular file, not a pipe or a device")
