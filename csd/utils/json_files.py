"""JSON files from others.

A file's size is bounded before it is parsed, then its values are checked; every error is a
ValueError that names the file, its line and the place within it.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np

from csd.utils.check import check

# most bytes of a line, and depth of its lists and objects, checked before it is parsed
MAX_LINE, MAX_DEPTH = 1 << 28, 64

T = TypeVar("T")


def read_file(path: str | Path, kind: type[T]) -> T:
    """JSON value of a whole file, which must fit `kind`."""
    with open(path, "rb") as file:
        data = file.read(MAX_LINE + 1)
    with naming(f"{path}"):
        return parse(data.removeprefix(b"\xef\xbb\xbf"), kind)


def read_lines(path: str | Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yield number, from 1, and JSON of each non-empty line of a file, which may be gzipped."""
    opened = gzip.open(path) if str(path).endswith(".gz") else open(path, "rb")  # noqa: SIM115
    number = 0
    with cast(IO[bytes], opened) as file:
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


def _check_depth(data: bytes) -> None:
    # a count that includes brackets within strings is enough for usual lines
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    outside = re.sub(rb'"(?:[^"\\]|\\.)*+"?+', b"", data, flags=re.DOTALL)
    brackets = np.frombuffer(outside, np.uint8)
    brackets = brackets[np.isin(brackets, np.frombuffer(b"[]{}", np.uint8))]
    step = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    if step.size and step.cumsum().max() > MAX_DEPTH:
        raise ValueError(f"must have at most {MAX_DEPTH} levels of nested lists and objects")
