"""x W^T + b for a few rows and a plain weight [N, K] of a user's module, which is not copied.

The numbers of a column of W^T are adjacent in memory, so LANES of them are multiplied at once, and
the sums of the lanes are added up at the end. As in `linear.py` a row's bits depend neither on
other rows nor on the threads. But sums are taken in another order, so a weight that is laid out for
`csd/kernels/numba/tiles.py` gives other bits.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.numba.jit import loop
from csd.kernels.numba.simd import (
    BYTE,
    FLOAT,
    INT,
    add_product,
    for_rows,
    halves,
    ints,
    prefetch,
    rounded,
)
from csd.kernels.numba.tensors import memory, readable
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.numba.tiles import COLUMNS, FLOATS, INTS, LANES, WIDE, in_pairs, is_dot

# most rows whose sums are held at once; most sums that leave registers for operands; most columns
ROWS, SUMS, SIDE = (8, 24, 8) if WIDE else (4, 10, 4)
DTYPES = (torch.bfloat16, torch.float32)
# most rows that are multiplied with a block of columns before the next block is read
MAX_ROWS = 12 * ROWS


@intrinsic
def dots(typing_context, rows, steps, x, weight, bias, y, stride, like, isa):
    """y[r stride + c] = bias[c] + sum over k of x[r, k] weight[c, k]

    For r < rows (1 to ROWS) and c < COLUMNS, in `steps` steps of LANES k in float32 and of 2 LANES
    k in bfloat16. A lane sums in the order of k, with "fma" the even k of a step before the odd
    ones; neither `rows` nor the place of a column changes a sum. x, weight, bias and y are
    addresses: bias of float32, or 0 for none, the others of the dtype of `like`, except that for
    "fma" of bfloat16 `_lay_apart` prepares x. Prefetches the lines of the columns that
    follow those that are multiplied.
    """
    low = like.dtype == types.uint16

    def generate(context, builder, signature, args):
        rows, *others = args[:-2]

        def some_rows(count):
            columns = min(SIDE, SUMS // count)
            made = _Dots(builder, count, low, is_dot(isa), *others)
            with cgutils.for_range(builder, rows.type(COLUMNS // columns)) as loop:
                made.columns(builder.mul(loop.index, rows.type(columns)), columns)
            if COLUMNS % columns:
                made.columns(rows.type(COLUMNS - COLUMNS % columns), COLUMNS % columns)

        for_rows(builder, rows, ROWS, some_rows)
        return context.get_dummy_value()

    index = types.intp
    return types.none(*[index] * 7, like, isa), generate


class _Dots:
    """Code for a fixed number of rows. low: bfloat16; pairs: numbers are multiplied in pairs."""

    def __init__(self, builder: Any, rows: int, low: bool, pairs: bool, *places: Any):
        self.builder, self.rows, self.low = builder, rows, low
        self.steps, self.x, self.weight, self.bias, self.y, self.stride = places
        self.apart, self.pairs = low and not pairs, pairs
        # bytes of a row of x and of a column of the weight
        self.width = self._times(self.steps, LANES * 4)
        self.row = self._times(self.width, 2) if self.apart else self.width

    def columns(self, first: Any, count: int) -> None:
        """Computes and stores the sums of all rows with `count` columns from `first` on."""
        builder = self.builder
        weight = builder.add(self.weight, builder.mul(first, self.width))
        rows, nothing = range(self.rows), ir.Constant(FLOATS, [0.0] * LANES)
        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(count)] for _ in rows]
        for row in sums:
            for total in row:
                builder.store(nothing, total)
        with cgutils.for_range(builder, self.steps) as loop:
            self._add(sums, weight, loop.index)
        for c in range(count):
            self._end([row[c] for row in sums], builder.add(first, first.type(c)))

    def _add(self, sums: list, weight: Any, step: Any) -> None:
        """Adds the products of a step to sums [rows][columns]; prefetches the next columns."""
        builder, count = self.builder, len(sums[0])
        offset = builder.add(weight, self._times(step, LANES * 4))
        offsets = [builder.add(offset, self._times(self.width, c)) for c in range(count)]
        for address in offsets:
            ahead = builder.add(address, self._times(self.width, count))
            prefetch(builder, builder.inttoptr(ahead, BYTE.as_pointer()))
        words = [self._load(address, INTS) for address in offsets]
        parts = [words]
        if self.apart:
            even = [builder.shl(word, ints(LANES, 16)) for word in words]
            parts = [even, [builder.and_(word, ints(LANES, 0xFFFF0000)) for word in words]]
        x = builder.add(self.x, self._times(step, LANES * 4 * len(parts)))
        for part, bits in enumerate(parts):
            columns = [builder.bitcast(column, FLOATS) for column in bits]
            for r, row in enumerate(sums):
                row_address = builder.add(x, self._times(self.row, r))
                numbers = self._load(builder.add(row_address, x.type(part * LANES * 4)), FLOATS)
                for total, column in zip(row, columns, strict=True):
                    added = add_product(builder, builder.load(total), numbers, column, self.pairs)
                    builder.store(added, total)

    def _end(self, sums: list, column: Any) -> None:
        """Adds the lanes of all rows' sums with a column to its bias; rounds and stores them."""
        builder = self.builder
        has = builder.icmp_signed("!=", self.bias, self.bias.type(0))
        start = cgutils.alloca_once_value(builder, FLOAT(0.0))
        with builder.if_then(has):
            offset = builder.add(self.bias, self._times(column, 4))
            builder.store(self._load(offset, FLOAT), start)
        for r, total in enumerate(sums):
            value = builder.load(total)
            while value.type.count > 1:
                value = builder.fadd(*halves(builder, value))
            value = builder.fadd(value, builder.bitcast(builder.load(start), value.type))
            if self.low:
                value = rounded(builder, value)
            value = builder.extract_element(value, INT(0))
            size = 2 if self.low else 4
            address = self._times(builder.add(self._times(self.stride, r), column), size)
            to = builder.inttoptr(builder.add(self.y, address), value.type.as_pointer())
            builder.store(value, to, align=size)

    def _times(self, x: Any, n: int) -> Any:
        return self.builder.mul(x, x.type(n))

    def _load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)


@loop
def multiply(
    threads,  # number of threads
    shape,  # M, N, K
    x,  # [M, K]
    apart,  # [M, K] float32, written: x of bfloat16 by `_lay_apart`, for "fma"
    weight,  # [N, K]
    bias,  # [N] float32, or 0 for none
    y,  # [M, N], written
    like,
    isa,  # one of `tiles.ISA`
):
    """y = x W^T + bias; all tensors are addresses, like an array of the dtype of x, weight, y."""
    M, _, K = shape
    source, width = x, K * like.itemsize
    if not in_pairs(isa) and like.itemsize == 2:
        _lay_apart(M * K, x, apart)
        source, width = apart, 4 * K
    multiply_columns(threads, shape, source, width, weight, bias, y, like, isa)


@by_threads
def _columns(part, parts, shape, source, width, weight, bias, y, like, isa):
    """Multiply rows of `source` (x or `apart`; `width` bytes) with blocks of COLUMNS columns."""
    M, N, K = shape
    row = K * like.itemsize
    steps = row // (4 * LANES)
    passes = -(-M // MAX_ROWS)
    rows_per_pass = -(-M // passes)
    begin, end = share(N // COLUMNS, part, parts)
    for top in range(0, M, rows_per_pass):
        left = min(rows_per_pass, M - top)
        tiles = -(-left // ROWS)
        each = -(-left // tiles)
        for c in range(begin, end):
            first = c * COLUMNS
            start = bias + 4 * first if bias else 0
            for t in range(tiles):
                r = top + t * each
                rows = min(each, left - t * each)
                out = y + (r * N + first) * like.itemsize
                offset = source + r * width
                dots(rows, steps, offset, weight + first * row, start, out, N, like, isa)


multiply_columns = _columns.run


@loop
def _lay_apart(count, x, y):
    """Write each 2 LANES bfloat16 numbers as float32: the even ones, then the odd ones."""
    words = memory(x, count // 2, np.empty(0, np.uint32))
    to = memory(y, count, np.empty(0, np.uint32))
    for first in range(0, count // 2, LANES):
        source, even = words[first : first + LANES], to[2 * first : 2 * first + LANES]
        odd = to[2 * first + LANES : 2 * first + 2 * LANES]
        for j in range(LANES):
            even[j] = np.uint32(source[j] << np.uint32(16))
            odd[j] = source[j] & np.uint32(0xFFFF0000)


def fits(weight: torch.Tensor) -> bool:
    """True if the loop can multiply a weight [N, K] in its present memory layout."""
    if weight.dtype not in DTYPES or not readable(weight) or weight.layout != torch.strided:
        return False
    N, K = weight.shape
    whole = N % COLUMNS == 0 and K * weight.itemsize % (4 * LANES) == 0
    return whole and weight.is_contiguous()
