"""Files that a run writes line by line, and that the same run goes on from after it was stopped."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from csd.schema.check import fits
from csd.schema.read import naming, parse


class ResumedFile:
    """A JSONL file: a line of settings, then one line for each piece of work that is done.

    A line is on disk before the next piece is begun. What an interruption left of a line is cut.
    One process at a time may hold a file.

    check: of row i, raises ValueError where it is none. kind: what writes such files, for messages.

    Raises ValueError when the file was written with other settings, is held by another process, or
    has a line that is none of a run's.
    """

    def __init__(
        self, path: str | Path, settings: dict, check: Callable[[int, Any], None], kind: str
    ):
        # without a buffer: what a full disk refuses is not tried again later
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        self._path = path
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{path} is being written by another process") from None
        self._file.seek(0)
        data = self._file.readall()
        first = _line({"settings": settings})
        whole = data.rfind(b"\n") + 1
        try:
            # nothing is cut of a file that is not a run's
            if not whole and not first.startswith(data):
                raise ValueError(f"{path} is not a {kind}; choose another -o")
            lines = _parsed(path, data[:whole], settings, check, kind)
            self._file.truncate(whole if len(lines) > 1 else 0)
            if len(lines) < 2:
                lines = []
                self._write([{"settings": settings}])
        except (ValueError, OSError):
            self._file.close()
            raise
        self.rows: list[dict] = lines[1:]

    def add(self, rows: list[dict]) -> None:
        self._write(rows)
        self.rows += rows

    def close(self) -> None:
        self._file.close()

    def _write(self, rows: list[dict]) -> None:
        data = memoryview(b"".join(map(_line, rows)))
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class _Settings(TypedDict):
    settings: dict


def _line(row: dict) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _parsed(
    path: str | Path, data: bytes, settings: dict, check: Callable[[int, Any], None], kind: str
) -> list[dict]:
    """The lines of a file. Raises ValueError where they are not those of these settings.

    A run that drew nothing, of a model that was not there, does not bind the next one.
    """
    lines: list[dict] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        with naming(f"{path}, line {number}"):
            row: Any = parse(line, Any)
            if number == 1 and not fits(row, _Settings):
                break
            if number > 1:
                check(number - 2, row)
            lines.append(row)
    if not data:
        return []
    if not lines:
        raise ValueError(f"{path} is not a {kind}; choose another -o")
    have = lines[0]["settings"]
    if len(lines) > 1 and have != settings:
        keys = [k for k in {**have, **settings} if have.get(k) != settings.get(k)]
        what = ", ".join(f"{k} {have.get(k)!r}, now {settings.get(k)!r}" for k in keys)
        raise ValueError(f"{path} was written with {what}; choose another -o, or remove it")
    return lines
