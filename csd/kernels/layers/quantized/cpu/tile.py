"""Code of a tile: sums of a few rows of x with one or two tiles of a quantised matrix.

Instructions by name; `instructions` lists those of this CPU, best first. All compute the same
integers, and the float32 operations on them are the same for each number, so the bits are equal:

- "vnni": AVX512-VNNI's vpdpbusd, 16 sums of 4 products of a number of w (unsigned) and of x.
- "avx_vnni": the same instruction for 8 sums, of half a tile, for its 16 registers.
- "avx2": vpmaddubsw, sums of two products in 16 bits, as many added as 16 bits hold. These hold
  2 x 127 x 127, so numbers of 8 bits are multiplied in two parts, seven bits and the highest one.
"""

import platform
from collections.abc import Iterator
from functools import cache, reduce
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.layers.quantized.cpu.round_rows import NUMBERS, WORDS, call
from csd.kernels.layers.quantized.formats import BLOCK, SUPER, TABLE, TABLE_OFFSET, TILE, Format
from csd.kernels.layers.quantized.rounding import GROUP
from csd.kernels.numba.lanes import FEATURES
from csd.kernels.numba.simd import (
    BYTE,
    FLOAT,
    INT,
    LINE,
    add_product,
    for_rows,
    halves,
    ints,
    places,
    prefetch,
    splat,
)

INSTRUCTIONS = "vnni", "avx_vnni", "avx2"
# most rows of a tile, whose sums leave registers for numbers; from SHARING rows on, two whole tiles
# of w are taken at once, which share each number of x, and parts of a tile one after the other
ROWS, SHARING = 6, 3
# columns of a tile whose sums code holds at once, by instruction; the largest absolute value of x
LANES = {"vnni": TILE, "avx_vnni": TILE // 2, "avx2": TILE // 2}
LARGEST = 128


@cache
def instructions() -> tuple[str, ...]:
    """Names of the instructions that this CPU has, the best one first; () if it has none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    has = FEATURES.split(",")
    wanted = {"vnni": ("+avx512vnni", "+avx512bw"), "avx_vnni": ("+avxvnni",), "avx2": ()}
    common = ("+avx2", "+fma", "+f16c")
    return tuple(n for n in INSTRUCTIONS if all(x in has for x in (*common, *wanted[n])))


def tile_of(format: Format, name: str) -> Any:
    """The intrinsic of a format and an instruction."""

    @intrinsic
    def tile(typing_context, rows, K, numbers, words, weight, size, start, step, y, stride, ahead):
        """y[r stride + c] = start[r step + c] + sum over k of x[r, k] w[c, k]

        For r < rows (1 to ROWS) and the columns c of two tiles. numbers, words: addresses in the
        workspace of `round_rows`; y, start: of float32; weight: of the first tile, of `size` bytes.
        Each block prefetches its own size at `ahead` plus its place in the tiles.
        """

        def generate(context, builder, signature, args):
            rows, K, numbers, words, weight, size, start, step, y, stride, ahead = args
            b = builder

            def code(count):
                if count >= SHARING and LANES[name] == TILE:
                    tiles = QuantizedTile(b, format, name, count, 2)
                    tiles.emit(K, numbers, words, weight, size, start, step, y, stride, ahead)
                    return
                with cgutils.for_range(b, K.type(2)) as loop:
                    base, columns = b.mul(loop.index, size), b.mul(loop.index, K.type(4 * TILE))
                    at, of_y, far = b.add(weight, base), b.add(y, columns), b.add(ahead, base)
                    one = QuantizedTile(b, format, name, count, 1)
                    from_ = b.add(start, columns)
                    one.emit(K, numbers, words, at, size, from_, step, of_y, stride, far)

            for_rows(b, rows, ROWS, code)
            return context.get_dummy_value()

        return types.none(*[types.intp] * 11), generate

    return tile


class QuantizedTile:
    """Code for a fixed number of rows and of tiles of w.

    Where an instruction takes a part of a tile's columns, few rows take all parts of a block at
    once, and more rows, whose sums fill the registers, SUPER numbers of k of one part and then of
    the next.
    """

    def __init__(self, builder: Any, format: Format, name: str, rows: int, tiles: int):
        self.b, self.format, self.name = builder, format, name
        self.rows, self.tiles, self.lanes = rows, tiles, LANES[name]
        self.floats = ir.VectorType(FLOAT, self.lanes)
        parts = TILE // self.lanes
        self.passes = parts if rows >= SHARING else 1
        # of what is read at once, parts of the first tile before those of the second
        self.held = parts // self.passes
        self.sums = [
            [cgutils.alloca_once(builder, self.floats) for _ in range(tiles * self.held)]
            for _ in range(rows)
        ]

    def emit(self, K, numbers, words, weight, far, start, step, y, stride, ahead) -> None:
        b, f = self.b, self.format
        self.numbers, self.words = numbers, words
        weights, ahead = (
            [b.add(base, b.mul(far, far.type(c))) for c in range(self.tiles)]
            for base in (weight, ahead)
        )
        parts: list = [K.type(part) for part in range(self.held)]
        self.columns = [*product(weights, parts)]
        blocks, each = b.udiv(K, K.type(BLOCK)), K.type(SUPER // BLOCK)
        size = SUPER // BLOCK * f.block_size + f.super_size
        supers = b.udiv(b.add(K, K.type(SUPER - 1)), K.type(SUPER))
        if self.passes == 1:
            self._load(start, step)
        with (
            cgutils.for_range(b, supers) as outer,
            cgutils.for_range(b, K.type(self.passes)) as which,
        ):
            if self.passes > 1:
                self.columns = [(w, which.index) for w in weights]
                is_first = b.icmp_unsigned("==", outer.index, K.type(0))
                self._load(b.select(is_first, start, y), b.select(is_first, step, stride))
            base, first = b.mul(outer.index, K.type(size)), b.mul(outer.index, each)
            left = b.sub(blocks, first)
            count = each if f.nested else b.select(b.icmp_unsigned("<", left, each), left, each)
            at = b.add(base, K.type(size - f.super_size))
            d = self._halves(at) if f.nested else None
            low = self._halves(b.add(at, K.type(2 * TILE))) if f.nested and f.minima else None
            with cgutils.for_range(b, count) as loop:
                at = b.add(base, b.mul(loop.index, K.type(f.block_size)))
                self._block(b.add(first, loop.index), at, d, low)
                self._fetch(ahead, at, f.block_size)
            if self.passes > 1:
                self._store(y, stride)
        if self.passes == 1:
            self._store(y, stride)

    def _load(self, base: Any, stride: Any) -> None:
        for pointer, total in self._places(base, stride):
            self.b.store(self.b.load(pointer, align=4), total)

    def _store(self, base: Any, stride: Any) -> None:
        for pointer, total in self._places(base, stride):
            self.b.store(self.b.load(total), pointer, align=4)

    def _places(self, base: Any, stride: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the place of each sum in float32 [rows, stride] at `base`, and the sum."""
        b = self.b
        for r, totals in enumerate(self.sums):
            for c, (total, (_, part)) in enumerate(zip(totals, self.columns, strict=True)):
                at = b.add(
                    b.mul(stride, stride.type(4 * r)), stride.type(4 * TILE * (c // self.held))
                )
                yield b.inttoptr(self._own(b.add(base, at), part, 4), total.type), total

    def _own(self, address: Any, part: Any, size: int) -> Any:
        """The address of a part of a vector of all columns' numbers, of `size` bytes each."""
        return self.b.add(address, self.b.mul(part, address.type(size * self.lanes)))

    def _fetch(self, ahead: list, at: Any, size: int) -> None:
        b = self.b
        for base in ahead:
            pointer = b.inttoptr(b.add(base, at), BYTE.as_pointer())
            for line in range(0, size, LINE):
                prefetch(b, b.gep(pointer, [INT(line)]))

    def _vectors(self, at: Any, kind: Any, size: int) -> list:
        """Vectors of numbers of `size` bytes, `at` bytes behind the beginning of each tile."""
        b, kind = self.b, ir.VectorType(kind, self.lanes)
        addresses = [self._own(b.add(w, at), part, size) for w, part in self.columns]
        return [b.load(b.inttoptr(x, kind.as_pointer()), align=size) for x in addresses]

    def _halves(self, at: Any) -> list:
        """Vectors of float16 as float32."""
        return [self.b.fpext(x, self.floats) for x in self._vectors(at, ir.HalfType(), 2)]

    def _block(self, i: Any, at: Any, d: list | None, d_low: list | None) -> None:
        """Adds the products of block i, which lies `at` bytes behind the beginning of a tile."""
        b, f, rows = self.b, self.format, self.rows
        x = b.inttoptr(self.numbers, INT.as_pointer())
        x = b.gep(x, [b.mul(i, i.type(NUMBERS * rows))])
        words = b.gep(b.inttoptr(self.words, FLOAT.as_pointer()), [b.mul(i, i.type(WORDS * rows))])

        def word(index: int, r: int, kind: Any = FLOAT) -> Any:
            pointer = b.bitcast(b.gep(words, [INT(index * rows + r)]), kind.as_pointer())
            return splat(b, b.load(pointer, align=4), self.lanes)

        vectors = self._numbers(at)
        each = _together(f, self.name)
        shift, width = f.offset.bit_length() - 1, TILE * f.groups * (1 if f.nested else 2)
        for g in range(BLOCK // GROUP):
            # sums begin at minus offset times the sum of x
            products = [[ints(self.lanes, 0)] * len(vectors) for _ in range(rows)]
            if f.offset:
                for r in range(rows):
                    start = b.shl(word(2 + g, r, INT), ints(self.lanes, shift))
                    products[r] = [start] * len(vectors)
            for first in range(4 * g, 4 * g + 4, each):
                chunk = range(first, first + each)
                columns = [[v.at(j) for j in chunk] for v in vectors]
                for r in range(rows):
                    own = (b.load(b.gep(x, [INT(j * rows + r)]), align=4) for j in chunk)
                    own = [splat(b, number, self.lanes) for number in own]
                    for c, column in enumerate(columns):
                        products[r][c] = _dot(b, self.name, f, products[r][c], column, own)
            if g < f.groups:
                scales = self._scales(at, f.numbers_size, g, d)
            for r in range(rows):
                for c in range(len(vectors)):
                    scale = b.fmul(scales[c], word(g, r))
                    self._add(r, c, b.sitofp(products[r][c], self.floats), scale)
            if f.minima and (f.groups == 2 or g == 1):
                lows = self._scales(at, f.numbers_size + width, g * (f.groups - 1), d_low)
                for r in range(rows):
                    for c in range(len(vectors)):
                        self._add(r, c, lows[c], word(4 + g if f.groups == 2 else 6, r))

    def _numbers(self, at: Any) -> list["BlockNumbers"]:
        """The numbers of the block `at` bytes behind the beginning of each tile."""
        addresses = [self._own(self.b.add(w, at), part, 4) for w, part in self.columns]
        return [BlockNumbers(self.b, self.format, x, self.lanes) for x in addresses]

    def _add(self, r: int, c: int, x: Any, y: Any) -> None:
        """Adds x y to a sum, with one rounding."""
        total = self.sums[r][c]
        self.b.store(add_product(self.b, self.b.load(total), x, y), total)

    def _scales(self, at: Any, place: int, g: int, d: list | None) -> list:
        """Scales or minima of group g of each tile's block, as float32; place: of group 0."""
        b = self.b
        if d is None:
            return self._halves(b.add(at, at.type(place + 2 * TILE * g)))
        whole = ir.VectorType(INT, self.lanes)
        small = self._vectors(b.add(at, at.type(place + TILE * g)), BYTE, 1)
        return [
            b.fmul(b.sitofp(b.sext(x, whole), self.floats), of_super)
            for x, of_super in zip(small, d, strict=True)
        ]


class BlockNumbers:
    """Vectors of a block's numbers, four k of `lanes` rows each, as unsigned bytes."""

    def __init__(self, builder: Any, format: Format, address: Any, lanes: int):
        self.b, self.format, self.lanes = builder, format, lanes
        self.base, self.loaded = address, {}  # type: Any, dict[int, Any]

    def _vector(self, i: int) -> Any:
        if i not in self.loaded:
            kind, at = ir.VectorType(INT, self.lanes), self.base.type(4 * TILE * i)
            pointer = self.b.inttoptr(self.b.add(self.base, at), kind.as_pointer())
            self.loaded[i] = self.b.load(pointer, align=1)
        return self.loaded[i]

    def at(self, j: int) -> Any:
        """Numbers 4 j to 4 j + 3."""
        b, bits = self.b, self.format.bits
        if bits == 8:
            return self._vector(j)
        q = self._vector(j % 4)
        if j >= 4:
            q = b.lshr(q, ints(self.lanes, 4))
        q = b.and_(q, _bytes(self.lanes, 0x0F))
        if self.format.table:
            return _lookup(b, q)
        if bits == 4:
            return q
        width = bits - 4
        each = 8 // width
        high, shift = self._vector(4 + j // each), width * (j % each) - 4
        if shift > 0:
            high = b.lshr(high, ints(self.lanes, shift))
        elif shift < 0:
            high = b.shl(high, ints(self.lanes, -shift))
        return b.or_(q, b.and_(high, _bytes(self.lanes, (1 << bits) - 16)))


def _bytes(lanes: int, value: int) -> ir.Constant:
    return ints(lanes, value * 0x01010101)


def _lookup(builder: Any, q: Any) -> Any:
    """TABLE[q] + TABLE_OFFSET for each byte."""
    b, kind = builder, ir.VectorType(BYTE, 32)
    table = ir.Constant(kind, [int(x) + TABLE_OFFSET for x in TABLE] * 2)
    if q.type.count == 8:
        found = call(b, "llvm.x86.avx2.pshuf.b", kind, table, b.bitcast(q, kind))
        return b.bitcast(found, q.type)
    return b.shuffle_vector(*(_lookup(b, half) for half in halves(b, q)), places(range(16)))


def _together(format: Format, name: str) -> int:
    """Vectors of four k whose products are added in 16 bits before they are widened: 1, 2 or 4."""
    if name != "avx2" or format.bits == 8 or format.table:
        return 1
    # sums of two products that 16 bits hold
    return min(4, (1 << 15) // (2 * LARGEST * ((1 << format.bits) - 1)))


def _dot(builder: Any, name: str, format: Format, total: Any, w: list, x: list) -> Any:
    """total + sums of four products of unsigned bytes of w and signed bytes of x.

    w, x: vectors of `_together` times four bytes of each lane.
    """
    b = builder
    if name == "vnni":
        return _vpdpbusd(b, "vpdpbusd", total, *w, *x)
    if name == "avx_vnni":
        return _vpdpbusd(b, "{vex} vpdpbusd", total, *w, *x)
    small, pairs = ir.VectorType(BYTE, 32), ir.VectorType(ir.IntType(16), 16)
    ones = ir.Constant(pairs, [1] * 16)

    def in_pairs(w: Any, x: Any) -> Any:
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", pairs, b.bitcast(w, small), b.bitcast(x, small))

    def added(total: Any, two: Any) -> Any:
        return b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", total.type, two, ones))

    if format.bits < 8 and not format.table:
        return added(total, reduce(b.add, map(in_pairs, w, x)))
    for part in (0x7F, 0x80):
        total = added(total, in_pairs(b.and_(*w, _bytes(8, part)), *x))
    return total


def _vpdpbusd(builder: Any, code: str, total: Any, w: Any, x: Any) -> Any:
    # the types of LLVM's intrinsic differ between versions, so this is inline assembly
    kind = ir.FunctionType(total.type, [total.type] * 3)
    constraints = "=v,v,v,0" if total.type.count == 16 else "=x,x,x,0"
    return builder.call(ir.InlineAsm(kind, f"{code} $2, $1, $0", constraints), [w, x, total])
