"""Append-only trace file that survives a crash of its writer.

`PATH.lock` is locked while the file `PATH` is open. While a line is appended, `PATH.lock` holds the
length that `PATH` had before, so that after a crash the next opening can cut the partial line. A
partial line without this mark is an error.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from csd.traces.traces import Trace, lock_of
from csd.utils.files import check_grows, check_regular, lies_at, names, naming_file, open_regular


class Journal:
    """An open trace file.

    Raises ValueError if the file is already open or, naming the line, is not a trace file.
    """

    def __init__(self, path: str | Path):
        # the same path for all names of the file
        self.path = Path(os.path.realpath(path))
        if self.path.suffix == ".gz":
            raise ValueError(
                f"path must be a trace file without gzip compression, got {str(path)!r}"
            )
        check_regular(path)
        self.tokens = 0  # tokens of all samples and prompts in the file
        self._lock = self._locked()
        try:
            self._mend()
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError:
            self._lock.close()
            raise

    @property
    def files(self) -> set[Path]:
        """Files that the journal writes."""
        return {self.path, lock_of(self.path), self._new}

    @property
    def _new(self) -> Path:
        return Path(f"{self.path}.new")

    def _locked(self) -> IO[bytes]:
        path = lock_of(self.path)
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        lock = open(file, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"{self.path} is open in another History or process") from None
        return lock

    def removed(self) -> bool:
        """True if the file was removed; `rewrite` creates it again.

        Raises ValueError if it is closed, or if meanwhile another file has its name or another
        process its lock.
        """
        if self.closed:
            raise ValueError(f"the history in {self.path} is closed")
        if not names(lock_of(self.path), self._lock):
            lock = self._locked()
            self._lock.close()
            self._lock = lock
        return not lies_at(self.path, self._file)

    def check(self) -> None:
        """Raise OSError if nothing could be appended now."""
        check_grows(self._file, self.path)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def read(self) -> Iterator[Trace]:
        """Read all traces; closes the file on an error."""
        self._file.seek(0)
        try:
            with open(self._file.fileno(), "rb", closefd=False) as lines:
                for number, line in enumerate(lines, 1):
                    trace = _parsed(self.path, number, line)
                    if trace is not None:
                        self.tokens += _tokens(trace)
                        yield trace
        except ValueError:
            self.close()
            raise

    def append(self, trace: Trace) -> None:
        """Append a trace and sync it to disk; after a crash or an OSError the file lacks it."""
        data, length = _line(trace), self._file.seek(0, os.SEEK_END)
        if length and os.pread(self._file.fileno(), 1, length - 1) != b"\n":
            data = b"\n" + data
        try:
            with naming_file(self.path):
                self._lock.write(str(length).encode())
                os.fsync(self._lock.fileno())
                _write(self._file.fileno(), data)
                os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(length)
            raise
        finally:
            # the mark is complete or empty: a partial mark would be joined with the next one
            self._lock.truncate(0)
        self.tokens += _tokens(trace)

    def rewrite(self, traces: Iterable[Trace]) -> None:
        """Replace the file by these traces; a crash or an OSError leaves the old or the new one."""
        new, tokens, fresh = self._new, 0, None
        try:
            flags = os.O_WRONLY | os.O_CREAT
            with naming_file(new), open(open_regular(new, flags), "wb") as file:
                file.truncate(0)
                for trace in traces:
                    file.write(_line(trace))
                    tokens += _tokens(trace)
                file.flush()
                os.fsync(file.fileno())
            # before the old file goes, since another may not be opened behind it
            fresh = open(new, "a+b", buffering=0)  # noqa: SIM115
            os.replace(new, self.path)
        except BaseException:
            if fresh is not None:
                fresh.close()
            new.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self.tokens = fresh, tokens

    def _mend(self) -> None:
        """Cut a partial line that a crash has left, and clear the mark."""
        self._lock.seek(0)
        mark = self._lock.read()
        if mark.isdigit() and self.path.exists() and int(mark) < self.path.stat().st_size:
            with open(self.path, "r+b") as file:
                file.seek(int(mark))
                if not file.read().endswith(b"\n"):
                    file.truncate(int(mark))
        self._lock.truncate(0)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _line(trace: Trace) -> bytes:
    return json.dumps(trace.to_dict(), separators=(",", ":")).encode() + b"\n"


def _tokens(trace: Trace) -> int:
    return len(trace.prompt) + sum(map(len, trace.samples))


def _parsed(path: Path, number: int, line: bytes) -> Trace | None:
    """The trace of a line, None for an empty line. Raises ValueError naming the line."""
    where = f"{path}, line {number}"
    if not line.strip():
        return None
    try:
        trace = Trace.parse(line.decode())
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else ", and the file ends within it"
        raise ValueError(f"{where}: {error}{cut}") from error
    lengths = [len(sample) for sample in trace.samples]
    if trace.top is not None and [len(top) for top in trace.top] != lengths:
        raise ValueError(f"{where}: 'top' must have one entry per token of 'samples'")
    return trace
