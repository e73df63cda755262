"""Products of a few rows with a block of a weight's columns; sums are held in registers."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from csd.kernels.numba.lanes import FEATURES
from csd.kernels.numba.simd import (
    BYTE,
    FLOAT,
    INT,
    LINE,
    add_product,
    for_rows,
    ints,
    prefetch,
    rounded,
    splat,
)

WIDE = "+avx512f" in FEATURES
# numbers of a register, columns of a block, and the most rows whose sums leave registers for the
# block's numbers and for one number of a row
LANES = 16 if WIDE else 8
COLUMNS = 2 * LANES
ROWS = 14 if WIDE else 6


# Instructions by name: "fma" multiplies numbers of float32, "dot" (AVX512-BF16) pairs of bfloat16.
# A loop is compiled for one of them, so the type of an argument selects it: that of an empty array,
# since numba cannot pass a namedtuple from one loop of several threads to another.
ISA = {"fma": np.empty(0, np.float32), "dot": np.empty(0, np.uint16)}


def in_pairs(isa: Any) -> bool:
    """True if an instruction of `ISA` multiplies pairs; a constant when a loop is compiled."""
    return isa.dtype == np.uint16


def is_dot(isa: types.Type) -> bool:
    """True if an instruction, given as an argument's numba type, multiplies pairs."""
    return isa.dtype == types.uint16


@overload(in_pairs)
def _in_pairs(isa):
    return (lambda isa: True) if is_dot(isa) else lambda isa: False


INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)


@intrinsic
def tile(typing_context, rows, steps, x, weight, start, y, stride, ahead, step, like, isa):
    """y[r stride + c] = start[c] + sum over k of x[r, k] weight[k, c]

    For r < rows (1 to ROWS) and c < COLUMNS. Every sum is taken over `steps` steps in the order of
    k, whatever `rows` is: "fma" takes one k per step, with one rounding per product, "dot" two, the
    odd one first. x, weight, start, y and ahead are addresses: start of float32, y of the dtype of
    `like`, weight as `linear.by_columns` lays it out, and x float32 [K, rows] for "fma", pairs of
    bfloat16 [K / 2, rows] for "dot". Each step prefetches the lines at ahead + (number of the step)
    times `step` bytes, which are multiplied later.
    """
    low = like.dtype == types.uint16

    def generate(context, builder, signature, args):
        rows, steps, x, weight, start, y, stride, ahead, step = args[:-2]

        def some_rows(count):
            made = _Tile(builder, count, low, pairs=is_dot(isa))
            made.begin(start)
            with cgutils.for_range(builder, steps) as loop:
                made.add(x, weight, loop.index)
                made.fetch(ahead, step, loop.index)
            made.end(y, stride)

        for_rows(builder, rows, ROWS, some_rows)
        return context.get_dummy_value()

    index = types.intp
    return types.none(*[index] * 9, like, isa), generate


class _Tile:
    """Code for a fixed number of rows. low: bfloat16; pairs: numbers are multiplied in pairs."""

    def __init__(self, builder: Any, rows: int, low: bool, pairs: bool):
        self.builder, self.rows, self.low, self.pairs = builder, rows, low, pairs
        self.sums = [[cgutils.alloca_once(builder, FLOATS) for _ in "lr"] for _ in range(rows)]

    def begin(self, start: Any) -> None:
        """Sets the sums of all rows to the COLUMNS float32 numbers at `start`."""
        pointer = self._at(start, FLOATS)
        for half in range(2):
            first = self.builder.load(self.builder.gep(pointer, [INT(half)]), align=4)
            for sums in self.sums:
                self.builder.store(first, sums[half])

    def add(self, x: Any, weight: Any, k: Any) -> None:
        """Adds the products of step k."""
        builder = self.builder
        x_k = builder.gep(self._at(x, FLOAT), [builder.mul(k, k.type(self.rows))])
        columns = self._columns(weight, k)
        for r, sums in enumerate(self.sums):
            number = builder.load(builder.gep(x_k, [INT(r)]))
            each = splat(builder, number, LANES)
            for total, column in zip(sums, columns, strict=True):
                added = add_product(builder, builder.load(total), each, column, self.pairs)
                builder.store(added, total)

    def _columns(self, weight: Any, k: Any) -> tuple[Any, Any]:
        """The weight's columns at step k, as two vectors of float32, or of pairs."""
        builder = self.builder
        if not self.low or self.pairs:
            offset = builder.gep(self._at(weight, FLOATS), [builder.mul(k, k.type(2))])
            return builder.load(offset, align=4), builder.load(
                builder.gep(offset, [INT(1)]), align=4
            )
        pair = builder.load(builder.gep(self._at(weight, INTS), [k]), align=2)
        left = builder.shl(pair, ints(LANES, 16))
        right = builder.and_(pair, ints(LANES, 0xFFFF0000))
        return builder.bitcast(left, FLOATS), builder.bitcast(right, FLOATS)

    def fetch(self, ahead: Any, step: Any, k: Any) -> None:
        """Prefetches the lines of a step at ahead + k step."""
        offset = self.builder.gep(self._at(ahead, BYTE), [self.builder.mul(k, step)])
        size = COLUMNS * (2 if self.low and not self.pairs else 4)
        for line in range(0, size, LINE):
            prefetch(self.builder, self.builder.gep(offset, [INT(line)]))

    def end(self, y: Any, stride: Any) -> None:
        """Rounds the sums and stores them in y."""
        builder, size = self.builder, 2 if self.low else 4
        for r, sums in enumerate(self.sums):
            for half, total in enumerate(sums):
                value = builder.load(total)
                if self.low:
                    value = rounded(builder, value)
                elements = builder.mul(stride, stride.type(r))
                offset = builder.add(elements, stride.type(half * LANES))
                byte = builder.gep(self._at(y, BYTE), [builder.mul(offset, offset.type(size))])
                builder.store(value, builder.bitcast(byte, value.type.as_pointer()), align=size)

    def _at(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())
