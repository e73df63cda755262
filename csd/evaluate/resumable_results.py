"""Result files that are written line by line, so that a stopped run can be resumed.

`csd record` (`record`) draws samples of prompts into such a file, and finally writes a trace file.
"""

import fcntl
import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, cast

from csd.engine.call import trace_of
from csd.engine.engine import Engine
from csd.traces.traces import Trace, TraceLine, open_traces, write_traces
from csd.utils.check import Between, check, fits, shown
from csd.utils.files import check_grows, check_regular, lies_at, naming, naming_file, parse


def part_of(out: str | Path) -> Path:
    """Path of a run's partial results, until its trace file is complete."""
    return Path(f"{out}.part")


def record(
    engine: Engine,
    prompts: list,
    out: str | Path,
    settings: dict,
    on_sample: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[Trace]:
    """Draw the missing samples of `prompts`, and write all samples to `out` in prompt order.

    settings: everything that samples depend on; a stopped run resumes only with equal settings.
    options: those of `csd.generate`; `seed` must be given.
    """
    part = ResumedFile(part_of(out), settings, _check_line, "part of a trace file")
    whole = None
    try:
        whole = open_traces(out)
        done = {row["problem"] for row in part.rows}
        if not done <= {*range(len(prompts))}:
            raise ValueError(f"{part_of(out)} has more prompts than the {len(prompts)} given")
        call = engine.prepare(prompts, record=os.fspath(out), **options)
        # the trace file is written below, not by the call
        call.record = None
        call.requests = [r for r in call.requests if r.index not in done]
        for request, _ in engine.draw(call) if call.requests else ():
            on_sample()
            # several samples of a prompt may end in one step
            if request.index not in done and request.progress.whole(until=None):
                done.add(request.index)
                part.add([trace_of(request).to_dict()])
        traces = [Trace.of(cast(TraceLine, row)) for row in part.rows]
        traces.sort(key=lambda trace: trace.problem)
        write_traces(whole, traces)
        part_of(out).unlink(missing_ok=True)
    finally:
        part.close()
        if whole is not None:
            whole.close()
    return traces


def _check_line(index: int, row: Any) -> None:
    check(row, TraceLine)
    number = row.get("problem")
    if not fits(number, Annotated[int, Between(0)]):
        raise ValueError(f"must have a prompt's number as 'problem', got {shown(number)}")


class ResumedFile:
    """A JSONL file: a line of settings, then one line per finished piece of work.

    A line is on disk before the next piece begins. A partial line after an interruption is cut. If
    the file is removed meanwhile, all of it is written again. Only one process at a time may have
    the file open.

    check: called with (i, row), raises ValueError if row i is not valid. kind: kind of file, for
    messages.

    Raises ValueError if the file was written with other settings, is open in another process, is
    not a regular file, or has a line that no run writes; OSError, naming the file, if it cannot be
    written.
    """

    def __init__(
        self, path: str | Path, settings: dict, check: Callable[[int, Any], None], kind: str
    ):
        check_regular(path)
        self._path, self._settings = path, settings
        self._file = self._open()
        self._file.seek(0)
        data = self._file.readall()
        first = _line({"settings": settings})
        whole = data.rfind(b"\n") + 1
        try:
            # never cut a file that no run has written
            if not whole and not first.startswith(data):
                raise ValueError(f"{path} is not a {kind}; choose another -o")
            lines = _parsed(path, data[:whole], settings, check, kind)
            self._file.truncate(whole if len(lines) > 1 else 0)
            if len(lines) < 2:
                lines = []
                self._write([{"settings": settings}])
            check_grows(self._file, path)
        except (ValueError, OSError):
            self._file.close()
            raise
        self.rows: list[dict] = lines[1:]

    def add(self, rows: list[dict]) -> None:
        if not lies_at(self._path, self._file):
            file = self._open()
            self._file.close()
            self._file = file
        empty = not os.fstat(self._file.fileno()).st_size
        self._write([{"settings": self._settings}, *self.rows, *rows] if empty else rows)
        self.rows += rows

    def close(self) -> None:
        self._file.close()

    def _open(self) -> FileIO:
        # unbuffered: a buffer would retry data that a full disk has refused
        file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{self._path} is being written by another process") from None
        return file

    def _write(self, rows: list[dict]) -> None:
        data = memoryview(b"".join(map(_line, rows)))
        length = os.fstat(self._file.fileno()).st_size
        try:
            with naming_file(self._path):
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(length)
            raise


def _line(row: dict) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _parsed(
    path: str | Path, data: bytes, settings: dict, check: Callable[[int, Any], None], kind: str
) -> list[dict]:
    """Parse the lines of a file. Raises ValueError if they belong to other settings.

    Settings without any rows, such as of a run whose model was not found, need not match.
    """
    lines: list[dict] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        with naming(f"{path}, line {number}"):
            row: Any = parse(line, Any)
            if number == 1 and not (fits(row, dict) and fits(row.get("settings"), dict)):
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
        raise ValueError(
            f"{path} was written with other settings ({what}); choose another -o, or remove it"
        )
    return lines
