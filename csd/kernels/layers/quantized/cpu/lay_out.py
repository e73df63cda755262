"""Tiles of a matrix from its rows in a file, as `formats.lay_out` makes them, in csd's loop.

Each bit of a tile is a bit of the row's block in the file, or its complement, or constant. Which
one it is follows from the tiles of blocks that have one bit, so a type has no code of its own here.
A vector of a tile has 1, 2 or 4 bytes of each of TILE rows: with words of the rows' blocks,

    vector = base xor (words[i] >> right << left & mask) xor ..
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csd.kernels.layers.quantized import formats
from csd.kernels.layers.quantized.formats import BLOCK, FORMATS, TILE, Format
from csd.kernels.numba.jit import loop
from csd.kernels.numba.simd import INT, splat
from csd.kernels.numba.tensors import memory

# a word of the block, as wide as the numbers of a row in the widest vector
WORD = 4
U8, U16, U32 = np.empty(0, np.uint8), np.empty(0, np.uint16), np.empty(0, np.uint32)


class Program(NamedTuple):
    """Steps that make the vectors of a unit, which has the numbers of a block of the file."""

    words: np.ndarray  # [W] int64, bytes from the block's begin to each word that is read
    vectors: np.ndarray  # [V, 3] int64: bytes of a row, end of its terms, base
    terms: np.ndarray  # [T, 4] uint32: index in words, right, left, mask


@cache
def program(name: str) -> Program:
    format = FORMATS[name]
    # a block without bits, then one with each bit
    bits = np.eye(8 * format.size, dtype=np.uint8)
    blocks = np.packbits(np.pad(bits, ((1, 0), (0, 0))), axis=1, bitorder="little")
    tiles = formats.lay_out(blocks, format)
    words: dict[int, int] = {}
    vectors: list[tuple[int, int, int]] = []
    terms: list[tuple[int, int, int, int]] = []
    at = 0
    for width in _widths(format):
        kind = np.dtype(f"uint{8 * width}")
        part = np.ascontiguousarray(tiles[:, at : at + TILE * width])
        values = part.view(kind).reshape(-1)[: len(blocks)].astype(np.uint32)
        at += TILE * width
        masks: dict[tuple[int, int], int] = {}
        for bit in np.flatnonzero(values[1:] ^ values[0]):
            changed = int(values[1 + bit] ^ values[0])
            for out in range(8 * width):
                if changed >> out & 1:
                    begin = _word_of(int(bit) // 8 - out // 8, width, format.size)
                    right = int(bit) - 8 * begin - out
                    masks[begin, right] = masks.get((begin, right), 0) | 1 << out
        for (begin, right), mask in masks.items():
            index = words.setdefault(begin, len(words))
            terms.append((index, max(right, 0), max(-right, 0), mask))
        vectors.append((width, len(terms), int(values[0])))
    return Program(
        np.array([*words], np.int64), np.array(vectors, np.int64), np.array(terms, np.uint32)
    )


def _widths(format: Format) -> list[int]:
    """Bytes of a row in each vector of a unit."""
    scale = 1 if format.nested else 2
    kinds = 2 if format.minima else 1
    block = [4] * (format.numbers_size // (4 * TILE)) + [scale] * (format.groups * kinds)
    return block * (format.numbers // BLOCK) + [2] * (kinds if format.nested else 0)


def _word_of(begin: int, width: int, size: int) -> int:
    """Begin of the word that holds `width` bytes of a block; words are shared where they can."""
    aligned = begin // WORD * WORD
    if begin - aligned + width <= WORD:
        begin = aligned
    return min(max(begin, 0), size - WORD)


@intrinsic
def _word_at(typing_context, address):
    """The uint32 at an address of any alignment."""
    kind = INT.as_pointer()
    return types.uint32(types.intp), lambda _, b, __, x: b.load(b.inttoptr(*x, kind), align=1)


@intrinsic
def _add_term(typing_context, made, word, right, left, mask):
    """made ^= word >> right << left & mask, for the TILE uint32 at two addresses."""
    kind = ir.VectorType(INT, TILE)

    def generate(context, builder, signature, args):
        b = builder
        made, word = (b.inttoptr(x, kind.as_pointer()) for x in args[:2])
        right, left, mask = (splat(b, x, TILE) for x in args[2:])
        term = b.and_(b.shl(b.lshr(b.load(word, align=4), right), left), mask)
        b.store(b.xor(b.load(made, align=4), term), made, align=4)
        return context.get_dummy_value()

    index, number = types.intp, types.uint32
    return types.none(index, index, number, number, number), generate


@loop
def _lay_out(tiles, units, rows, row_bytes, size, out, words, vectors, terms):
    """Write the tiles at `out`; rows: address of rows of `row_bytes` bytes."""
    read = np.empty((len(words), TILE), np.uint32)
    made = np.empty(TILE, np.uint32)
    unit_bytes = TILE * vectors[:, 0].sum()
    for tile in range(tiles):
        for unit in range(units):
            block = rows + tile * TILE * row_bytes + unit * size
            target = out + (tile * units + unit) * unit_bytes
            for r in range(TILE):
                for w in range(len(words)):
                    read[w, r] = _word_at(block + r * row_bytes + words[w])
            first = 0
            for v in range(len(vectors)):
                width, last = vectors[v, 0], vectors[v, 1]
                made[:] = np.uint32(vectors[v, 2])
                for t in range(first, last):
                    word = read.ctypes.data + terms[t, 0] * TILE * WORD
                    _add_term(made.ctypes.data, word, terms[t, 1], terms[t, 2], terms[t, 3])
                first = last
                if width == 4:
                    memory(target, TILE, U32)[:] = made
                elif width == 2:
                    memory(target, TILE, U16)[:] = made.astype(np.uint16)
                else:
                    memory(target, TILE, U8)[:] = made.astype(np.uint8)
                target += TILE * width


def lay_out(rows: np.ndarray, format: Format, out: np.ndarray) -> None:
    """Write rows of a file, [N, bytes of a row] uint8, as tiles to `out`."""
    rows = np.ascontiguousarray(formats.padded(rows))
    steps, (N, row_bytes) = program(format.name), rows.shape
    units = row_bytes // format.size
    _lay_out(
        N // TILE,
        units,
        rows.ctypes.data,
        row_bytes,
        format.size,
        out.ctypes.data,
        *steps,
    )
