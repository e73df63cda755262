"""Input and output files, JSON files, and files in folders that others may write to.

A file to read may have another's name and contents. An output file is tested before the run begins,
and written completely or not at all. A JSON file's size is bounded before it is parsed, then its
values are checked; every error is a ValueError that names the file, its line and the place within.

In a folder of others, as of caches and locks, another user may have put a link, a pipe or a file: a
link that is followed would let this process empty the file of its own user that it leads to, and a
pipe would block it.
"""

import errno
import fcntl
import gzip
import hashlib
import json
import os
import re
import select
import stat
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np

from csd.utils.check import check

# most bytes of a line, depth of its lists and objects, and number of these, which take 20 times the
# bytes of their text; checked before it is parsed
MAX_LINE, MAX_DEPTH, MAX_LISTS = 1 << 28, 64, 1 << 23

T = TypeVar("T")


def digest(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: str | Path, kind: type[T]) -> T:
    """JSON value of a whole file, which must fit `kind`."""
    with open_input(path) as file:
        data = file.read(MAX_LINE + 1)
    with naming(f"{path}"):
        return parse(data.removeprefix(b"\xef\xbb\xbf"), kind)


def read_lines(path: str | Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yield number, from 1, and JSON of each non-empty line of a file, which may be gzipped."""
    number = 0
    with ExitStack() as stack:
        file = stack.enter_context(open_input(path))
        if str(path).endswith(".gz"):
            file = stack.enter_context(cast(IO[bytes], gzip.open(file)))  # noqa: SIM115
        while True:
            number += 1
            try:
                line = file.readline(MAX_LINE + 1)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path}, line {number} cannot be unpacked: {error}") from error
            if not line:
                return
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip() or len(line) > MAX_LINE:
                with naming(f"{path}, line {number}"):
                    yield number, parse(line, kind)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Prefix ValueErrors of the block with `source`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source} {error}") from error


def parse(data: bytes, kind: type[T]) -> T:
    """JSON value that fits `kind`. The message of a ValueError continues its place's name."""
    if len(data) > MAX_LINE:
        raise ValueError(f"must have at most {MAX_LINE >> 20} MiB")
    _check_depth(data)
    try:
        value = json.loads(data.decode(), parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from error
    except ValueError as error:
        # also raised for numbers of thousands of digits
        raise ValueError(f"is not JSON: {error}") from error
    check(value, kind)
    return value


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a number")


_NO_BRACKETS = bytes({*range(256)} - {*b"[]{}"})


def _check_depth(data: bytes) -> None:
    """Raises ValueError for more lists and objects, or deeper ones, than a line may have."""
    # a count that includes brackets within strings is enough for usual lines
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    outside = re.sub(rb'"(?:[^"\\]|\\.)*+"?+', b"", data, flags=re.DOTALL)
    brackets = np.frombuffer(outside.translate(None, _NO_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    if opens.sum() > MAX_LISTS:
        raise ValueError(f"must have at most {MAX_LISTS} lists and objects")
    depth = np.where(opens, np.int8(1), np.int8(-1)).cumsum(dtype=np.int32)
    if depth.size and depth.max() > MAX_DEPTH:
        raise ValueError(f"must have at most {MAX_DEPTH} levels of nested lists and objects")


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


class WholeFile:
    """A file that is written once, at the end of a run: completely, or it stays as it was before.

    The constructor opens it, locks it against other writers and tests writing, so that a file that
    cannot be written is refused before the run. A pipe or a device is written to directly.

    alone: False for a file that is written at once, and may be by several processes or threads:
        each one's file is whole, and the last one's stays.

    Raises OSError, which names the file, if it cannot be written, and, if `alone`, ValueError if
    another process or call is writing it.
    """

    def __init__(self, path: str | Path, *, alone: bool = True):
        named = Path(path)
        if named.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # a pipe or a device is not replaced
        self._replaces = not named.exists() or named.is_file()
        self.path = Path(os.path.realpath(named)) if self._replaces else named
        # in the same folder, where a rename is atomic. A file left by a killed run is overwritten
        own = ".new" if alone else f".{uuid.uuid4().hex[:12]}"
        self._part, self._alone = Path(f"{self.path}{own}") if self._replaces else named, alone
        self._open()

    @property
    def files(self) -> set[Path]:
        """Paths of the file and of its temporary file."""
        return {self.path, self._part}

    def write(self, lines: Iterable[bytes]) -> None:
        """Write all lines and close. After an error the file is as it was before."""
        try:
            if self._replaces and not names(self._part, self._file):
                # removed since it was opened
                self._file.close()
                self._open()
            with naming_file(self.path):
                self._file.writelines(lines)
                self._file.flush()
                if self._replaces:
                    os.fsync(self._file.fileno())
                    os.replace(self._part, self.path)
                    self._replaces = False
        finally:
            self.close()

    def close(self) -> None:
        """Close and remove the temporary file. Without `write`, the file stays as it was before."""
        if not self._file.closed and self._replaces and names(self._part, self._file):
            self._part.unlink(missing_ok=True)
        # data that a full disk has refused is refused again
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> "WholeFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> None:
        with naming_file(self.path):
            if self._replaces:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._file: IO[bytes] = os.fdopen(open_regular(self._part, flags), "ab")
            else:
                self._file = open(self._part, "ab")  # noqa: SIM115
        try:
            if self._replaces and self._alone:
                self._take()
            with naming_file(self.path):
                try_writing(self._file.fileno())
                if self._replaces:
                    _write_and_take_back(self._file.fileno())
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the name may belong to another process's file by now
            mine = names(self._part, self._file)
        except BlockingIOError:
            mine = False
        if not mine:
            self._replaces = False
            raise ValueError(f"{self.path} is being written by another process")
        self._file.truncate(0)


def try_writing(file: int) -> None:
    """Raises OSError for a pipe without a reader, and for a full device."""
    mode = os.fstat(file).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        poll = select.poll()
        poll.register(file, select.POLLOUT)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    elif stat.S_ISCHR(mode) and not os.isatty(file):
        os.write(file, b"\n")


def _write_and_take_back(file: int) -> None:
    """Append a newline to a regular file that ends in a line, and remove it; raises OSError."""
    length = os.fstat(file).st_size
    try:
        os.write(file, b"\n")
    finally:
        os.ftruncate(file, length)


def check_grows(file: IO[bytes], path: str | Path) -> None:
    """Raises OSError, which names the file, if an open regular file cannot be appended to."""
    with naming_file(path):
        _write_and_take_back(file.fileno())


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a pipe, a device or a folder, which cannot be read again."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{os.fspath(path)} must be a regular file, which can be read again")


def lies_at(path: str | Path, file: IO[bytes]) -> bool:
    """True if `path` still names the open file; False if the name has been removed.

    Raises ValueError if another file has the name now.
    """
    if names(path, file):
        return True
    if os.path.lexists(path):
        raise ValueError(f"{path} has been replaced by another file since it was opened")
    return False


def names(path: str | Path, file: IO[bytes]) -> bool:
    """True if `path` names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Name the file in an OSError of the block."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


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
