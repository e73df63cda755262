"""Header of a GGUF file: its keys, and its tensors, whose numbers are read when they are asked for.

The gguf package's own reader makes an array for each text of a vocabulary, which takes seconds. It
maps the file, whose pages count as memory of the process, and reads what is behind its end as
nothing.
"""

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

# entries of a list in a header: of the tokens or merges of a vocabulary
MAX_ENTRIES = 1 << 22
# types of values, by their numbers in a file
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST = 8, 9
# types of tensors whose numbers are not in blocks -> numpy's
_PLAIN = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}


class CutFile(ValueError):
    """The file ends before its header or its tensors do."""


class ByteTexts(Sequence[bytes]):
    """The texts of a list, as bytes."""

    def __init__(self, data: bytes, begins: array, ends: array):
        self._data, self._begins, self._ends = data, begins, ends

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, i: Any) -> Any:
        return self._data[self._begins[i] : self._ends[i]]

    def __iter__(self) -> Iterator[bytes]:
        return (self._data[a:b] for a, b in zip(self._begins, self._ends, strict=True))


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """Rows of a matrix in a file, as bytes; a slice of them is read anew each time."""

    path: str
    offset: int
    shape: tuple[int, int]

    def __getitem__(self, part: slice) -> np.ndarray:
        count, width = self.shape
        first, last, _ = part.indices(count)
        begin = self.offset + first * width
        read = np.fromfile(self.path, np.uint8, (last - first) * width, offset=begin)
        return read.reshape(last - first, width)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file. shape: the innermost dimension comes last."""

    path: str
    name: str
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    bytes: int

    def matrices(self) -> list[MatrixRows]:
        """The rows of each of its matrices."""
        *batch, rows, _ = self.shape
        count = prod(batch)
        size = self.bytes // count
        one = rows, size // rows
        return [MatrixRows(self.path, self.offset + i * size, one) for i in range(count)]

    def read(self) -> np.ndarray:
        """Its numbers, or [.., bytes of a row] uint8 if they are in blocks."""
        kind = np.dtype(_PLAIN.get(self.kind.name, "u1"))
        data = np.fromfile(self.path, kind, self.bytes // kind.itemsize, offset=self.offset)
        return data.reshape(*self.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class Header:
    """Keys by name, of which lists of texts are `ByteTexts`, and tensors."""

    keys: dict[str, Any]
    tensors: list[Tensor]


def below(keys: dict[str, Any], start: str) -> dict[str, Any]:
    """The keys that begin with `start`, without it."""
    return {key.removeprefix(start): v for key, v in keys.items() if key.startswith(start)}


def header_of(path: str) -> Header:
    """The header of the file at `path`. Raises ValueError, `CutFile` if the file ends too early.

    The last one is kept, since the model's and the tokenizer's loader both need it.
    """
    stat = os.stat(path)
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1)
def _read(path: str, changed: int, size: int) -> Header:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Parser(path, data).header()
        # a length may be too large for an offset
        except (struct.error, OverflowError):
            raise CutFile(f"the file ends within its header, after {len(data):,} bytes") from None


class _Parser:
    def __init__(self, path: str, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin as a GGUF file does")
        self.at = 4
        (version,) = self.take("I")
        if version not in (2, 3):
            raise ValueError(f"its version must be 2 or 3, in this machine's order, got {version}")
        tensors, count = self.take("QQ")
        keys: dict[str, Any] = {}
        for _ in range(count):
            name = self.text()
            if name in keys:
                raise ValueError(f"it has the key {name} twice")
            keys[name] = self.value(*self.take("I"))
        return Header(keys, self.tensors(tensors, keys.get("general.alignment", 32)))

    def take(self, kinds: str) -> tuple:
        """The next numbers, of these types of `struct`."""
        found = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def text(self) -> str:
        (size,) = self.take("Q")
        if size > len(self.data) - self.at:
            raise struct.error
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise ValueError(f"its header has a value of the unknown type {kind}")
        of, count = self.take("IQ")
        if count > MAX_ENTRIES:
            raise ValueError(f"its header has a list of {count} entries")
        if of in _SCALARS:
            return [*self.take(f"{count}{_SCALARS[of]}")]
        return self.texts(count) if of == _TEXT else [self.value(of) for _ in range(count)]

    def texts(self, count: int) -> ByteTexts:
        size_at, data, first, at = struct.Struct("<Q").unpack_from, self.data, self.at, 0
        begins, ends = array("q"), array("q")
        for _ in range(count):
            begins.append(at + 8)
            at += 8 + size_at(data, first + at)[0]
            ends.append(at)
        self.at += at
        if self.at > len(data):
            raise struct.error
        return ByteTexts(data[first : self.at], begins, ends)

    def tensors(self, count: int, alignment: Any) -> list[Tensor]:
        import gguf

        found: dict[str, tuple] = {}
        for _ in range(count):
            name = self.text()
            if name in found:
                raise ValueError(f"it has the tensor {name} twice")
            shape = self.take(f"{self.take('I')[0]}Q")[::-1]
            found[name] = shape, *self.take("IQ")
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment must be a power of 2, got {alignment!r}")
        begin = -(-self.at // alignment) * alignment
        tensors = []
        for name, (shape, number, offset) in found.items():
            kind = gguf.GGMLQuantizationType(number)
            numbers, size = gguf.GGML_QUANT_SIZES[kind]
            if not shape or not all(shape) or shape[-1] % numbers:
                raise ValueError(f"its {name} of type {kind.name} has the shape {shape}")
            bytes = prod(shape) // numbers * size
            tensors.append(Tensor(self.path, name, kind, shape, begin + offset, bytes))
        end = max((t.offset + t.bytes for t in tensors), default=begin)
        if end > len(self.data):
            have = f"the file has {len(self.data):,} bytes, and its tensors end after {end:,}"
            raise CutFile(have)
        return tensors
