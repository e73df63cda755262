"""Rows of a product's x as int8: `round_blocks` of the folder above, laid out for tiles of rows.

A workspace holds, one after the other and in this order for tiles of at most `each` rows:

    int8 [K / 4, rows, 4]        the rounded numbers
    words [K / BLOCK, 7, rows]   of a block's two groups: the scales (float32), -1 times the sums of
                                 the numbers (int32), the sums times the scales, and their sum
                                 (float32)

and the same for the second digits of the rows that need them.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.layers.quantized.formats import BLOCK
from csd.kernels.layers.quantized.rounding import DIGIT, GROUP, OUTLIER
from csd.kernels.numba.jit import loop
from csd.kernels.numba.simd import BYTE, FLOAT, INT, ints, splat
from csd.kernels.numba.tensors import memory
from csd.kernels.numba.threads import by_threads, share

LANES = 16
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)
# 32-bit words of a row's block in the workspace: of numbers, and of scales and sums
NUMBERS, WORDS = BLOCK // 4, 7
I64 = np.empty(0, np.int64)


def _rounder(second: bool) -> Any:
    """The intrinsic that computes the first or the second digits of a block."""

    @intrinsic
    def round_block(typing_context, x, numbers, words, count):
        """Round BLOCK float32 at x to int8; returns the larger and the sum of the groups' tops.

        numbers, words: addresses of the block's first words of this row; the next ones follow
        `count` words apart.
        """

        def generate(context, builder, signature, args):
            larger, total = _round_block(builder, *args, second)
            kind = signature.return_type
            return context.make_tuple(builder, kind, (larger, total))

        index = types.intp
        return types.UniTuple(types.float32, 2)(index, index, index, index), generate

    return round_block


round_first, round_second = _rounder(False), _rounder(True)


def _round_block(
    b: Any, x: Any, numbers: Any, words: Any, count: Any, second: bool
) -> tuple[Any, Any]:
    source = b.inttoptr(x, FLOATS.as_pointer())

    def store(value: Any, base: Any, at: int) -> None:
        pointer = b.inttoptr(base, value.type.as_pointer())
        b.store(value, b.gep(pointer, [b.mul(count, count.type(at))]), align=4)

    def rounded(values: Any, inverse: Any) -> Any:
        return call(b, "llvm.rint.v16f32", FLOATS, b.fmul(values, splat(b, inverse, LANES)))

    tops, totals = [], []
    for group in range(BLOCK // LANES):
        values = b.load(b.gep(source, [INT(group)]), align=4)
        top = b.and_(b.bitcast(values, INTS), ints(LANES, 0x7FFFFFFF))
        top = b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", INT, top), FLOAT)
        some = b.fcmp_ordered(">", top, FLOAT(0.0))
        inverse = b.select(some, b.fdiv(FLOAT(127.0), top), FLOAT(0.0))
        scale = own = b.fmul(top, _number(1 / 127))
        digits = rounded(values, inverse)
        if second:
            minus = splat(b, b.fneg(scale), LANES)
            left = call(b, "llvm.fma.v16f32", FLOATS, digits, minus, values)
            digits = rounded(left, b.fmul(inverse, _number(DIGIT)))
            own = b.fmul(scale, _number(1 / DIGIT))
        # NaN and infinity come back through the scale
        whole = call(b, "llvm.fptosi.sat.v16i32.v16f32", INTS, digits)
        packed = b.bitcast(b.trunc(whole, ir.VectorType(BYTE, LANES)), ir.VectorType(INT, 4))
        for j in range(4):
            store(b.extract_element(packed, INT(j)), numbers, 4 * group + j)
        total = call(b, "llvm.vector.reduce.add.v16i32", INT, whole)
        store(own, words, group)
        store(b.neg(total), words, 2 + group)
        totals.append(b.fmul(b.sitofp(total, FLOAT), own))
        store(totals[-1], words, 4 + group)
        tops.append(top)
    store(b.fadd(*totals), words, 6)
    larger = b.select(b.fcmp_unordered(">=", *tops), *tops)
    return larger, b.fadd(*tops)


def _number(value: float) -> ir.Constant:
    return FLOAT(float(np.float32(value)))


def call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """Call of an intrinsic of LLVM."""
    function = ir.FunctionType(kind, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values)


@loop
def places(M, K):
    """Bytes in a workspace to the numbers of rows, their words, and those of second digits."""
    numbers = (8 * (M + 1) + 63) // 64 * 64
    words = numbers + M * K
    seconds = words + M * (K // BLOCK) * WORDS * 4
    return numbers, words, seconds, seconds + M * K


@loop
def workspace_size(M, K):
    """Bytes of a workspace for M rows."""
    return places(M, K)[3] + M * (K // BLOCK) * WORDS * 4


@by_threads
def _round(part, parts, M, K, each, x, workspace):
    """Round rows; a row's index in the workspace's list becomes 1 if it needs second digits."""
    blocks = K // BLOCK
    numbers, words, _, _ = places(M, K)
    marks = memory(workspace, M + 1, I64)
    begin, end = share(M, part, parts)
    for m in range(begin, end):
        first = m // each * each
        count, r = min(each, M - first), m % each
        top, total = np.float32(0), np.float32(0)
        for i in range(blocks):
            larger, both = round_first(
                x + (m * K + i * BLOCK) * 4,
                workspace + numbers + first * K + (i * NUMBERS * count + r) * 4,
                workspace + words + (first * blocks * WORDS + i * WORDS * count + r) * 4,
                count,
            )
            top, total = max(top, larger), total + both
        marks[m + 1] = top * np.float32(K // GROUP) > np.float32(OUTLIER) * total


_run = _round.run


@loop
def round_rows(threads, M, K, each, x, workspace):
    """Round x [M, K] float32 into a workspace, for tiles of at most `each` rows.

    The workspace begins with the number of rows that have second digits, and their indices.
    """
    _run(threads, M, K, each, x, workspace)
    blocks = K // BLOCK
    _, _, seconds, second_words = places(M, K)
    rows, found = memory(workspace, M + 1, I64), 0
    for m in range(M):
        if rows[m + 1]:
            found += 1
            rows[found] = m
    rows[0] = found
    for n in range(found):
        first = n // each * each
        count, r = min(each, found - first), n % each
        for i in range(blocks):
            round_second(
                x + (rows[n + 1] * K + i * BLOCK) * 4,
                workspace + seconds + first * K + (i * NUMBERS * count + r) * 4,
                workspace + second_words + (first * blocks + i * count) * WORDS * 4 + r * 4,
                count,
            )
