"""JSON files from others.

A file's size is bounded before it is parsed, then its values are checked; every error is a
ValueError that names the file, its line and the place within it.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np

from csd.utils.check import check
from csd.utils.files import open_input

# most bytes of a line, depth of its lists and objects, and number of these, which take 20 times the
# bytes of their text; checked before it is parsed
MAX_LINE, MAX_DEPTH, MAX_LISTS = 1 << 28, 64, 1 << 23

T = TypeVar("T")


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
