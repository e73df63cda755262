"""Code of a tile: sums of a few rows of x with one or two tiles of a quantised matrix.

Instructions by name, of which a CPU's best is `best()`; all compute the same integers, and the
float32 operations on them are the same for each number, so the bits are equal:

- "vnni": AVX512-VNNI's vpdpbusd, 16 sums of 4 products of a number of w (unsigned) and of x.
- "avx_vnni": the same instruction for 8 sums.
- "avx2": vpmaddubsw, sums of two products in 16 bits. These hold 2 x 127 x 127, so numbers of 8
  bits are multiplied in two parts, the lower seven bits and the highest one.
"""

import platform
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.layers.quantized.cpu.round_rows import FLOATS, INTS, LANES, NUMBERS, WORDS, call
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
# most rows of a tile, whose sums leave registers for numbers; fewer than SHARING rows take two
# tiles of w one after the other, and more take both at once, which share each number of x
ROWS, SHARING = 6, 3
HALVES = ir.VectorType(ir.HalfType(), LANES)


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
                if count >= SHARING:
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
    """Code for a fixed number of rows and of tiles of w."""

    def __init__(self, builder: Any, format: Format, name: str, rows: int, tiles: int):
        self.b, self.format, self.name = builder, format, name
        self.rows, self.tiles = rows, tiles
        self.sums = [
            [cgutils.alloca_once(builder, FLOATS) for _ in range(tiles)] for _ in range(rows)
        ]

    def emit(self, K, numbers, words, weight, far, start, step, y, stride, ahead) -> None:
        b, f = self.b, self.format
        self._each(start, step, lambda p, total: b.store(b.load(p, align=4), total))
        blocks = b.udiv(K, K.type(BLOCK))
        self.numbers, self.words = numbers, words
        self.weights = [b.add(weight, b.mul(far, far.type(c))) for c in range(self.tiles)]
        ahead = [b.add(ahead, b.mul(far, far.type(c))) for c in range(self.tiles)]
        if not f.nested:
            with cgutils.for_range(b, blocks) as loop:
                at = b.mul(loop.index, K.type(f.block_size))
                self._block(loop.index, at, None, None)
                self._fetch(ahead, at, f.block_size)
        else:
            each = SUPER // BLOCK
            size = each * f.block_size
            with cgutils.for_range(b, b.udiv(K, K.type(SUPER))) as outer:
                base = b.mul(outer.index, K.type(size + f.super_size))
                d = [self._halves(b.add(w, b.add(base, K.type(size)))) for w in self.weights]
                low = None
                if f.minima:
                    at = b.add(base, K.type(size + 2 * TILE))
                    low = [self._halves(b.add(w, at)) for w in self.weights]
                with cgutils.for_range(b, K.type(each)) as loop:
                    i = b.add(b.mul(outer.index, K.type(each)), loop.index)
                    at = b.add(base, b.mul(loop.index, K.type(f.block_size)))
                    self._block(i, at, d, low)
                    self._fetch(ahead, at, f.block_size)
        self._each(y, stride, lambda p, total: b.store(b.load(total), p, align=4))

    def _each(self, base: Any, stride: Any, run: Any) -> None:
        """run(pointer, sum) for each row and tile; base, stride: of float32, [rows, stride]."""
        b = self.b
        for r, totals in enumerate(self.sums):
            for c, total in enumerate(totals):
                at = b.add(b.mul(stride, stride.type(4 * r)), stride.type(4 * TILE * c))
                run(b.inttoptr(b.add(base, at), FLOATS.as_pointer()), total)

    def _fetch(self, ahead: list, at: Any, size: int) -> None:
        b = self.b
        for base in ahead:
            pointer = b.inttoptr(b.add(base, at), BYTE.as_pointer())
            for line in range(0, size, LINE):
                prefetch(b, b.gep(pointer, [INT(line)]))

    def _halves(self, address: Any) -> Any:
        """TILE float16 as float32."""
        b = self.b
        return b.fpext(b.load(b.inttoptr(address, HALVES.as_pointer()), align=2), FLOATS)

    def _block(self, i: Any, at: Any, d: list | None, d_low: list | None) -> None:
        """Adds the products of block i, which lies `at` bytes behind the beginning of a tile."""
        b, f, rows = self.b, self.format, self.rows
        weights = [b.add(w, at) for w in self.weights]
        x = b.inttoptr(self.numbers, INT.as_pointer())
        x = b.gep(x, [b.mul(i, i.type(NUMBERS * rows))])
        words = b.gep(b.inttoptr(self.words, FLOAT.as_pointer()), [b.mul(i, i.type(WORDS * rows))])

        def word(index: int, r: int, kind: Any = FLOAT) -> Any:
            pointer = b.bitcast(b.gep(words, [INT(index * rows + r)]), kind.as_pointer())
            return splat(b, b.load(pointer, align=4), LANES)

        vectors = [BlockNumbers(b, f, w, self.name) for w in weights]
        shift, width = f.offset.bit_length() - 1, TILE * f.groups * (1 if f.nested else 2)
        for g in range(BLOCK // GROUP):
            # sums begin at minus offset times the sum of x
            products = [[ints(LANES, 0)] * self.tiles for _ in range(rows)]
            if f.offset:
                for r in range(rows):
                    start = b.shl(word(2 + g, r, INT), ints(LANES, shift))
                    products[r] = [start] * self.tiles
            for j in range(4 * g, 4 * g + 4):
                columns = [v.at(j) for v in vectors]
                for r in range(rows):
                    number = splat(b, b.load(b.gep(x, [INT(j * rows + r)]), align=4), LANES)
                    for c, column in enumerate(columns):
                        products[r][c] = _dot(b, self.name, f, products[r][c], column, number)
            if g < f.groups:
                scales = self._scales(weights, f.numbers_size, g, d)
            for r in range(rows):
                for c in range(self.tiles):
                    scale = b.fmul(scales[c], word(g, r))
                    self._add(r, c, b.sitofp(products[r][c], FLOATS), scale)
            if f.minima and (f.groups == 2 or g == 1):
                lows = self._scales(weights, f.numbers_size + width, g * (f.groups - 1), d_low)
                for r in range(rows):
                    for c in range(self.tiles):
                        self._add(r, c, lows[c], word(4 + g if f.groups == 2 else 6, r))

    def _add(self, r: int, c: int, x: Any, y: Any) -> None:
        """Adds x y to a sum, with one rounding."""
        total = self.sums[r][c]
        self.b.store(add_product(self.b, self.b.load(total), x, y), total)

    def _scales(self, weights: list, at: int, g: int, d: list | None) -> list:
        """Scales or minima of group g of each tile's block, as float32."""
        b = self.b
        if d is None:
            return [self._halves(b.add(w, w.type(at + 2 * TILE * g))) for w in weights]
        kind = ir.VectorType(BYTE, LANES).as_pointer()
        out = []
        for w, of_super in zip(weights, d, strict=True):
            small = b.load(b.inttoptr(b.add(w, w.type(at + TILE * g)), kind), align=1)
            out.append(b.fmul(b.sitofp(b.sext(small, INTS), FLOATS), of_super))
        return out


class BlockNumbers:
    """Vectors of a block's numbers, four k of TILE rows each, as unsigned bytes."""

    def __init__(self, builder: Any, format: Format, address: Any, name: str):
        self.b, self.format, self.name = builder, format, name
        self.base = builder.inttoptr(address, INTS.as_pointer())
        self.loaded: dict[int, Any] = {}

    def _vector(self, i: int) -> Any:
        if i not in self.loaded:
            self.loaded[i] = self.b.load(self.b.gep(self.base, [INT(i)]), align=1)
        return self.loaded[i]

    def at(self, j: int) -> Any:
        """Numbers 4 j to 4 j + 3."""
        b, bits = self.b, self.format.bits
        if bits == 8:
            return self._vector(j)
        q = self._vector(j % 4)
        if j >= 4:
            q = b.lshr(q, ints(LANES, 4))
        q = b.and_(q, _bytes(0x0F))
        if self.format.table:
            return _lookup(b, q, self.name)
        if bits == 4:
            return q
        width = bits - 4
        each = 8 // width
        high, shift = self._vector(4 + j // each), width * (j % each) - 4
        if shift > 0:
            high = b.lshr(high, ints(LANES, shift))
        elif shift < 0:
            high = b.shl(high, ints(LANES, -shift))
        return b.or_(q, b.and_(high, _bytes((1 << bits) - 16)))


def _bytes(value: int) -> ir.Constant:
    return ints(LANES, value * 0x01010101)


def _by_halves(builder: Any, run: Any, *vectors: Any) -> Any:
    """run(..) of the lower and of the upper halves of vectors, joined."""
    parts = [run(*pair) for pair in zip(*(halves(builder, v) for v in vectors), strict=True)]
    count = parts[0].type.count
    return builder.shuffle_vector(*parts, places(range(2 * count)))


def _lookup(builder: Any, q: Any, name: str) -> Any:
    """TABLE[q] + TABLE_OFFSET for each byte."""
    b, half = builder, ir.VectorType(BYTE, 32)
    entries = [int(x) + TABLE_OFFSET for x in TABLE]

    def one(part: Any) -> Any:
        table = ir.Constant(half, entries * 2)
        found = call(b, "llvm.x86.avx2.pshuf.b", half, table, b.bitcast(part, half))
        return b.bitcast(found, ir.VectorType(INT, 8))

    return _by_halves(b, one, q)


def _dot(builder: Any, name: str, format: Format, total: Any, w: Any, x: Any) -> Any:
    """total + sum of four products of unsigned bytes of w and signed bytes of x."""
    b = builder
    if name == "vnni":
        return _vpdpbusd(b, "vpdpbusd", total, w, x)
    eight = ir.VectorType(INT, 8)
    if name == "avx_vnni":
        return _by_halves(b, lambda *parts: _vpdpbusd(b, "{vex} vpdpbusd", *parts), total, w, x)
    small, pairs = ir.VectorType(BYTE, 32), ir.VectorType(ir.IntType(16), 16)
    ones = ir.Constant(pairs, [1] * 16)

    def products(part: Any, x: Any) -> Any:
        two = call(b, "llvm.x86.avx2.pmadd.ub.sw", pairs, b.bitcast(part, small), x)
        return call(b, "llvm.x86.avx2.pmadd.wd", eight, two, ones)

    def one(total: Any, w: Any, x: Any) -> Any:
        x = b.bitcast(x, small)
        if format.bits < 8 and not format.table:
            return b.add(total, products(w, x))
        low, high = (b.and_(w, ints(8, mask * 0x01010101)) for mask in (0x7F, 0x80))
        return b.add(b.add(total, products(low, x)), products(high, x))

    return _by_halves(b, one, total, w, x)


def _vpdpbusd(builder: Any, code: str, total: Any, w: Any, x: Any) -> Any:
    # the types of LLVM's intrinsic differ between versions, so this is inline assembly
    kind = ir.FunctionType(total.type, [total.type] * 3)
    constraints = "=v,v,v,0" if total.type.count == 16 else "=x,x,x,0"
    return builder.call(ir.InlineAsm(kind, f"{code} $2, $1, $0", constraints), [w, x, total])
