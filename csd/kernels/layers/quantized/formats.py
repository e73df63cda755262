"""Types of quantised tensors in a GGUF file, and the layout in which a product reads them.

A matrix w [N, K] has a scale s, and in some types a minimum l, for each group of 16 or 32 numbers:

    w[n, k] = s[n, k / group] (q[n, k] - offset) + l[n, k / group],    0 <= q < 2^bits

or, with a table, s TABLE[q]. s and l are float16 in the file, or (`nested`) the product of an 8-bit
integer and a float16 of SUPER numbers; that product is exact in float32. All of this is kept as it
is in the file, so no number changes; only the order in memory does:

    tile of TILE rows of w, an even number of them; in it, block after block of BLOCK numbers of k:
        64-byte vectors of 4 k of TILE rows: two of them, 16 k apart, in the halves of each byte
        (bits 5 and 6 follow in vectors of their own), or one where a number has 8 bits
        the scales of the block's groups, then the minima: TILE float16, or TILE 8-bit integers
        and behind each SUPER / BLOCK blocks, where nested, TILE float16 scales, then minima

ggml's `block_q4_K` and the like define the types; tests compare them with the gguf package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

# rows of a tile, numbers of a block, numbers of a float16 scale of nested types
TILE, BLOCK, SUPER = 16, 32, 256
PAIR = 2 * TILE
# numbers of IQ4_NL and IQ4_XS, ggml's `kvalues_iq4nl`
TABLE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
# what is added to a number of the table, so that a product reads it as unsigned
TABLE_OFFSET = 128


class Blocks(NamedTuple):
    """A matrix's numbers and scales, as in the file but each in an array of its own."""

    q: np.ndarray  # [N, K] uint8
    scale: np.ndarray  # [N, K / group] float16, or int8 where nested
    low: np.ndarray | None = None  # minima, of the same shape and dtype
    d: np.ndarray | None = None  # [N, K / SUPER] float16, of the scales
    d_low: np.ndarray | None = None  # [N, K / SUPER] float16, of the minima


@dataclass(frozen=True, slots=True)
class Format:
    """A type of a file; name: that of `gguf.GGMLQuantizationType`."""

    name: str
    bits: int  # 4, 5, 6 or 8, in memory
    group: int
    size: int  # bytes of a block of the file
    read: Callable[[np.ndarray], Blocks]  # of [.., size] bytes
    offset: int = 0
    minima: bool = False
    nested: bool = False
    table: bool = False

    @property
    def numbers(self) -> int:
        """Numbers of a block of the file."""
        return SUPER if self.nested else BLOCK

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return BLOCK // self.group

    @property
    def numbers_size(self) -> int:
        """Bytes of the numbers of a block of a tile."""
        return TILE * BLOCK * self.bits // 8

    @property
    def block_size(self) -> int:
        """Bytes of a block of a tile, without what nested types have behind each SUPER numbers."""
        width = TILE * (1 if self.nested else 2)
        return self.numbers_size + width * self.groups * (2 if self.minima else 1)

    @property
    def super_size(self) -> int:
        """Bytes behind SUPER numbers of a tile."""
        return TILE * 2 * (2 if self.minima else 1) if self.nested else 0

    def tile_size(self, K: int) -> int:
        """Bytes of a tile of K numbers of each row."""
        return K // BLOCK * self.block_size + K // SUPER * self.super_size

    def serves(self, K: int) -> bool:
        return K % self.numbers == 0


def _half(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16)


def _nibbles(x: np.ndarray) -> np.ndarray:
    """Halves of [.., 16 n] bytes, n times 16 numbers from the low and 16 from the high ones."""
    x = x.reshape(*x.shape[:-1], -1, 1, 16)
    return np.concatenate((x & 15, x >> 4), -2).reshape(*x.shape[:-3], -1)


def _simple(minima: bool, fifth: bool) -> Callable[[np.ndarray], Blocks]:
    """Reader of types with 16-bit scales: scale, minimum, fifth bits, halves of bytes."""
    at = 4 if minima else 2

    def read(x: np.ndarray) -> Blocks:
        q = _nibbles(x[..., at + 4 * fifth :])
        if fifth:
            q = q | np.unpackbits(x[..., at : at + 4], axis=-1, bitorder="little") << 4
        return Blocks(q, _half(x[..., :2]), _half(x[..., 2:4]) if minima else None)

    return read


def _q8_0(x: np.ndarray) -> Blocks:
    return Blocks(x[..., 2:] ^ 128, _half(x[..., :2]))


def _shifted(x: np.ndarray, width: int, mask: int) -> np.ndarray:
    """[.., n] bytes as [.., 8 / width, n] numbers, the lowest bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (x[..., None, :] >> shifts) & np.uint8(mask)


def _flat(x: np.ndarray, axes: int) -> np.ndarray:
    return x.reshape(*x.shape[:-axes], -1)


def _q2_k(x: np.ndarray) -> Blocks:
    q = _flat(_shifted(x[..., 16:80].reshape(*x.shape[:-1], 2, 32), 2, 3), 3)
    scale, low = x[..., :16] & 15, x[..., :16] >> 4
    return Blocks(
        q, scale.view(np.int8), low.view(np.int8), _half(x[..., 80:82]), _low(x[..., 82:])
    )


def _low(x: np.ndarray) -> np.ndarray:
    """Minima are subtracted in the file and added in `Blocks`."""
    return -_half(x)


def _q3_k(x: np.ndarray) -> Blocks:
    low = _flat(_shifted(x[..., 32:96].reshape(*x.shape[:-1], 2, 32), 2, 3), 3)
    high = _flat(_shifted(x[..., :32], 1, 1), 2)
    packed = x[..., 96:108]
    four = np.concatenate((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    two = _flat(_shifted(packed[..., 8:], 2, 3), 2)
    scale = (four | two << 4).view(np.int8) - np.int8(32)
    return Blocks(low | high << 2, scale, d=_half(x[..., 108:]))


def _scales_k(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and minima of 6 bits in the 12 bytes of Q4_K and Q5_K."""
    a, b, c = x[..., :4], x[..., 4:8], x[..., 8:]
    scale = np.concatenate((a & 63, (c & 15) | (a >> 6) << 4), -1)
    low = np.concatenate((b & 63, (c >> 4) | (b >> 6) << 4), -1)
    return scale.view(np.int8), low.view(np.int8)


def _q4_k(x: np.ndarray) -> Blocks:
    scale, low = _scales_k(x[..., 4:16])
    q = _flat(_shifted(x[..., -128:].reshape(*x.shape[:-1], 4, 32), 4, 15), 3)
    return Blocks(q, scale, low, _half(x[..., :2]), _low(x[..., 2:4]))


def _q5_k(x: np.ndarray) -> Blocks:
    four, fifth = _q4_k(x), _flat(_shifted(x[..., 16:48], 1, 1), 2)
    return four._replace(q=four.q | fifth << 4)


def _q6_k(x: np.ndarray) -> Blocks:
    four = _shifted(x[..., :128].reshape(*x.shape[:-1], 2, 64), 4, 15)
    two = _shifted(x[..., 128:192].reshape(*x.shape[:-1], 2, 32), 2, 3)
    q = _flat(four, 3) | _flat(two, 3) << 4
    return Blocks(q, x[..., 192:208].view(np.int8), d=_half(x[..., 208:]))


def _iq4_xs(x: np.ndarray) -> Blocks:
    four = _flat(np.stack((x[..., 4:8] & 15, x[..., 4:8] >> 4), -1), 2)
    two = _flat(_shifted(x[..., 2:4], 2, 3).swapaxes(-1, -2), 2)
    scale = (four | two << 4).view(np.int8) - np.int8(32)
    return Blocks(_nibbles(x[..., 8:]), scale, d=_half(x[..., :2]))


FORMATS = {
    format.name: format
    for format in (
        Format("Q4_0", 4, 32, 18, _simple(False, False), offset=8),
        Format("Q4_1", 4, 32, 20, _simple(True, False), minima=True),
        Format("Q5_0", 5, 32, 22, _simple(False, True), offset=16),
        Format("Q5_1", 5, 32, 24, _simple(True, True), minima=True),
        Format("Q8_0", 8, 32, 34, _q8_0, offset=128),
        Format("Q2_K", 4, 16, 84, _q2_k, minima=True, nested=True),
        Format("Q3_K", 4, 16, 110, _q3_k, offset=4, nested=True),
        Format("Q4_K", 4, 32, 144, _q4_k, minima=True, nested=True),
        Format("Q5_K", 5, 32, 176, _q5_k, minima=True, nested=True),
        Format("Q6_K", 6, 16, 210, _q6_k, offset=32, nested=True),
        Format("IQ4_NL", 4, 32, 18, _simple(False, False), offset=TABLE_OFFSET, table=True),
        Format("IQ4_XS", 4, 32, 136, _iq4_xs, offset=TABLE_OFFSET, nested=True, table=True),
    )
}


def tiles_of(N: int) -> int:
    """Number of tiles of N rows."""
    return -(-N // PAIR) * 2


def padded(rows: np.ndarray) -> np.ndarray:
    """Rows of a file with further rows of 0 up to an even number of tiles."""
    blank = tiles_of(len(rows)) * TILE - len(rows)
    return np.pad(rows, ((0, blank), (0, 0))) if blank else rows


@cache
def unit_of(format: Format) -> np.dtype:
    """Type of a tile's bytes for a block of the file: blocks, then the scales of SUPER numbers.

    The minima follow the scales, if the format has any.
    """
    kinds, scale = 1 + format.minima, np.int8 if format.nested else np.float16
    numbers = "q", np.uint32, (BLOCK * format.bits // 32, TILE)
    block = np.dtype([numbers, ("scales", scale, (kinds, format.groups, TILE))])
    blocks = "blocks", block, (format.numbers // BLOCK,)
    return np.dtype([blocks, ("d", np.float16, (kinds * format.nested, TILE))])


def lay_out(rows: np.ndarray, format: Format) -> np.ndarray:
    """Rows of a file [N, bytes of a row] as [tiles, bytes of a tile] uint8.

    The number of tiles is even; missing rows are blocks of zeros.
    """
    rows, tiles = padded(rows), tiles_of(len(rows))
    file = format.read(rows.reshape(len(rows), -1, format.size))
    out = np.empty((tiles, rows.shape[1] // format.size), unit_of(format))
    blocks, d = out["blocks"], out["d"]
    q = np.ascontiguousarray(file.q).reshape(len(rows), -1)
    blocks["q"] = _numbers(q, format).reshape(blocks["q"].shape)
    for i, x in enumerate((file.scale, file.low)):
        if x is not None:
            groups = x.reshape(tiles, TILE, *blocks.shape[1:], format.groups)
            blocks["scales"][..., i, :, :] = groups.transpose(0, 2, 3, 4, 1)
    for i, x in enumerate((file.d, file.d_low)):
        if x is not None:
            d[..., i, :] = x.reshape(tiles, TILE, -1).transpose(0, 2, 1)
    return out.view(np.uint8)


def rows_of(data: np.ndarray, format: Format, K: int, ids: np.ndarray) -> np.ndarray:
    """Rows `ids` [M] of a matrix that `lay_out` made, dequantised: [M, K] float32."""
    units, tile, lane = data.view(unit_of(format)), ids // TILE, ids % TILE
    blocks = units["blocks"]
    # [M, supers, blocks, kinds, groups]
    scales = blocks["scales"][tile, ..., lane].astype(np.float32)
    if format.nested:
        of_super = units["d"][tile, ..., lane].astype(np.float32)
        scales *= of_super[:, :, None, :, None]
    q = _unpacked(blocks["q"][tile, ..., lane], format)
    w = TABLE[q] if format.table else q.astype(np.int16) - np.int16(format.offset)
    out = w.reshape(*w.shape[:-1], format.groups, format.group) * scales[..., 0, :, None]
    if format.minima:
        out += scales[..., 1, :, None]
    return out.reshape(len(ids), K)


def _unpacked(words: np.ndarray, format: Format) -> np.ndarray:
    """Numbers [.., BLOCK] of the words [.., n] of a row's block."""
    if format.bits != 8:
        low = words[..., :4]
        low = np.concatenate((low, low >> np.uint32(4)), -1) & np.uint32(0x0F0F0F0F)
        if format.bits > 4:
            width = format.bits - 4
            shifts = np.arange(0, 8, width, dtype=np.uint32)
            high = words[..., 4:, None] >> shifts & np.uint32(
                (1 << width) * 0x01010101 - 0x01010101
            )
            low |= high.reshape(low.shape) << np.uint32(4)
        words = low
    return np.ascontiguousarray(words).view(np.uint8)


def _numbers(q: np.ndarray, format: Format) -> np.ndarray:
    """The vectors of numbers of all tiles and blocks, [tiles, K / BLOCK, vectors, TILE] uint32."""
    N, K = q.shape
    words = q.view(np.uint32).reshape(N // TILE, TILE, K // BLOCK, 8)
    words = np.ascontiguousarray(words.transpose(0, 2, 3, 1))
    if format.bits == 8:
        return words
    low = words & np.uint32(0x0F0F0F0F)
    out = [low[:, :, :4] | low[:, :, 4:] << np.uint32(4)]
    if format.bits > 4:
        # of 5 bits one vector, of 6 two: each has a bit or two of the vectors of numbers
        high, width = words >> np.uint32(4), format.bits - 4
        high = high & np.uint32((1 << width) * 0x01010101 - 0x01010101)
        high = high.reshape(*high.shape[:2], width, 8 // width, TILE)
        shifts = (np.arange(8 // width, dtype=np.uint32) * width)[:, None]
        out.append(np.bitwise_or.reduce(high << shifts, axis=3))
    return np.concatenate(out, 2)
