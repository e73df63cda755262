"""LLVM vectors as numba values: numba's own loops do not keep such sums in registers.

LLVM compiles them to instructions of the CPU at hand, on any CPU. Arrays are flat and contiguous,
and a negative index does not count from the end. Blocks of a matrix are widened, transposed, or put
in pairs of bfloat16 for products.

A sum has BLOCK lanes whatever the width of the CPU's vectors is, and `added_lanes` adds these in
one order, so its bits are the same on every CPU.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from csd.kernels.numba.simd import (
    BYTE,
    INT,
    add_product,
    halves,
    ints,
    places,
    prefetch,
    rounded_words,
    splat,
)

FEATURES = config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
CPU: str = llvm.get_host_cpu_name()
# numbers per row of sums: the sums of four rows fill the registers
WIDTH = 64 if "+avx512f" in FEATURES else 16
# numbers per block: a block of BLOCK keys by BLOCK numbers of a head is transposed at once
BLOCK = 16

FLOATS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


class Lanes(types.Type):
    """numba type of a vector of `count` numbers of a dtype."""

    def __init__(self, dtype: types.Type, count: int):
        self.dtype, self.count = dtype, count
        super().__init__(f"lanes({dtype}, {count})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes):
        super().__init__(manager, lanes, ir.VectorType(FLOATS[lanes.dtype], lanes.count))


@intrinsic
def lanes(typing_context, x, offset):
    """x[offset : offset + WIDTH] as a vector"""
    return _lanes(x, WIDTH)


@intrinsic
def block(typing_context, x, offset):
    """x[offset : offset + BLOCK] as a vector"""
    return _lanes(x, BLOCK)


def _lanes(x: types.Array, count: int) -> tuple[Any, Any]:
    kind = Lanes(x.dtype, count)

    def generate(context, builder, signature, args):
        return load(context, builder, x, *args, context.get_value_type(kind))

    return kind(x, types.intp), generate


@intrinsic
def put(typing_context, value, x, offset):
    """x[offset : offset + n] = value, a vector of n numbers"""

    def generate(context, builder, signature, args):
        store(context, builder, x, *args[1:], args[0])
        return context.get_dummy_value()

    return types.none(value, x, types.intp), generate


@intrinsic
def add_multiple(typing_context, total, x, row):
    """total + x row for vectors total and row and a number x, rounded once"""

    def generate(context, builder, signature, args):
        number = splat(builder, args[1], total.count)
        return add_product(builder, args[0], number, args[2])

    return total(total, row.dtype, row), generate


@intrinsic
def filled(typing_context, number):
    """a vector of BLOCK copies of a number"""
    kind = Lanes(number, BLOCK)
    return kind(number), lambda _, builder, __, args: splat(builder, args[0], BLOCK)


@intrinsic
def plus(typing_context, x, y):
    """x + y for vectors"""
    return x(x, y), lambda _, builder, __, args: builder.fadd(*args)


@intrinsic
def times(typing_context, x, y):
    """x y for vectors"""
    return x(x, y), lambda _, builder, __, args: builder.fmul(*args)


@intrinsic
def minus(typing_context, x):
    """-x for a vector"""
    return x(x), lambda _, builder, __, args: builder.fneg(args[0])


@intrinsic
def doubles(typing_context, x):
    """a vector of float32 or float64 as float64"""
    kind = Lanes(types.float64, x.count)

    def generate(context, builder, signature, args):
        return args[0] if x == kind else builder.fpext(args[0], context.get_value_type(kind))

    return kind(x), generate


@intrinsic
def at_least(typing_context, x, number):
    """bits of the lanes of x that are at least a number, the first in the lowest bit"""

    def generate(context, builder, signature, args):
        kept = builder.fcmp_ordered(">=", args[0], splat(builder, args[1], x.count))
        return builder.zext(builder.bitcast(kept, ir.IntType(x.count)), ir.IntType(64))

    return types.int64(x, x.dtype), generate


@intrinsic
def select(typing_context, x, bits, other):
    """Lanes of x where the bit is set, else those of `other`, a vector or a number."""

    def generate(context, builder, signature, args):
        chosen, bits, value = args
        if not isinstance(other, Lanes):
            value = splat(builder, value, x.count)
        mask = builder.trunc(bits, ir.IntType(x.count))
        mask = builder.bitcast(mask, ir.VectorType(ir.IntType(1), x.count))
        return builder.select(mask, chosen, value)

    return x(x, types.int64, other), generate


@intrinsic
def add_to_lane(typing_context, total, lane, number):
    """total with a number added to one of its lanes"""

    def generate(context, builder, signature, args):
        vector, lane, value = args
        value = builder.fadd(builder.extract_element(vector, lane), value)
        return builder.insert_element(vector, value, lane)

    return total(total, types.intp, total.dtype), generate


@intrinsic
def added_lanes(typing_context, x):
    """sum of the lanes: of the lower and the upper half, until one number is left"""
    return x.dtype(x), lambda _, builder, __, args: _added(builder, args[0])


@intrinsic
def added_pair(typing_context, x, y):
    """sum of the lanes of two vectors: the halves of x, then those of y, then as `added_lanes`"""

    def generate(context, builder, signature, args):
        (first, second), (third, last) = (halves(builder, value) for value in args)
        for part in (second, third, last):
            first = builder.fadd(first, part)
        return _added(builder, first)

    return x.dtype(x, y), generate


def _added(builder: Any, value: Any) -> Any:
    while value.type.count > 1:
        value = builder.fadd(*halves(builder, value))
    return builder.extract_element(value, INT(0))


@intrinsic
def fetch(typing_context, x, offset):
    """Prefetch the cache line of x[offset], which is read next, into the first level."""
    return _fetch(x, level=1)


@intrinsic
def fetch_early(typing_context, x, offset):
    """Prefetch the line of x[offset] into the second level: the first is too small for the data."""
    return _fetch(x, level=2)


def _fetch(x: types.Array, level: int) -> tuple[Any, Any]:
    def generate(context, builder, signature, args):
        prefetch(builder, pointer(context, builder, x, *args, BYTE), level)
        return context.get_dummy_value()

    return types.none(x, types.intp), generate


def load(context: Any, builder: Any, kind: types.Array, x: Any, offset: Any, vector: Any) -> Any:
    """Code that loads a value of type `vector` from x[offset]; kind: numba type of x."""
    return builder.load(pointer(context, builder, kind, x, offset, vector), align=_bytes(kind))


def store(context: Any, builder: Any, kind: types.Array, x: Any, offset: Any, value: Any) -> None:
    """Code that stores a value at x[offset]; kind: numba type of x."""
    builder.store(value, pointer(context, builder, kind, x, offset, value.type), align=_bytes(kind))


def pointer(context: Any, builder: Any, kind: types.Array, x: Any, offset: Any, vector: Any) -> Any:
    """Pointer to x[offset] as a value of type `vector`; kind: numba type of x."""
    array = context.make_array(kind)(context, builder, x)
    return builder.bitcast(builder.gep(array.data, [offset]), vector.as_pointer())


def _bytes(kind: types.Array) -> int:
    return kind.dtype.bitwidth // 8


@intrinsic
def widen(typing_context, x, offset, y, to):
    """y[to : to + BLOCK] = x[offset : offset + BLOCK], with bfloat16 widened to float32"""

    def generate(context, builder, signature, args):
        vector = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        value = _numbers(builder, load(context, builder, x, args[0], args[1], vector))
        store(context, builder, y, args[2], args[3], value)
        return context.get_dummy_value()

    return types.none(x, types.intp, y, types.intp), generate


@intrinsic
def transpose(typing_context, x, offset, stride, last, y, to, y_stride):
    """y[to + d y_stride + j] = x[offset + min(j, last) stride + d] for j, d < BLOCK

    bfloat16 is widened to float32. Each round interleaves rows j and j + BLOCK / 2; after four
    rounds each vector is a column.
    """

    def generate(context, builder, signature, args):
        x_, offset, stride, last, y_, to, y_stride = args
        vector = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        rows = []
        for j in range(BLOCK):
            least = builder.select(builder.icmp_signed("<", last, last.type(j)), last, last.type(j))
            start = builder.add(offset, builder.mul(least, stride))
            rows.append(_numbers(builder, load(context, builder, x, x_, start, vector)))
        half = BLOCK // 2
        low = [k // 2 + k % 2 * BLOCK for k in range(BLOCK)]
        high = [k + half for k in low]
        for _ in range(BLOCK.bit_length() - 1):
            rows = [
                builder.shuffle_vector(rows[j], rows[j + half], places(part))
                for j in range(half)
                for part in (low, high)
            ]
        for d, row in enumerate(rows):
            start = builder.add(to, builder.mul(y_stride, y_stride.type(d)))
            store(context, builder, y, y_, start, row)
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, index, y, index, index), generate


@intrinsic
def pair(typing_context, x, offset, stride, y, to):
    """y[to : to + BLOCK] = pairs of x[offset :] and x[offset + stride :], or zeros if stride is 0

    x: bfloat16. The number of x[offset :] is the odd one of its pair, whose product is added first.
    """

    def generate(context, builder, signature, args):
        x_, offset, stride, y_, to = args
        vector = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        odd = load(context, builder, x, x_, offset, vector)
        even = load(context, builder, x, x_, builder.add(offset, stride), vector)
        is_there = builder.icmp_signed("!=", stride, stride.type(0))
        even = builder.select(is_there, even, ir.Constant(vector, [0] * BLOCK))
        store(context, builder, y, y_, to, _pairs(builder, odd, even))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, y, index), generate


@intrinsic
def round_pairs(typing_context, x, offset, count, y, to):
    """y[to : to + BLOCK] = pairs of adjacent numbers of x[offset :], rounded to bfloat16

    Numbers from `count` on become zeros. The first number of a pair is its odd one.
    """

    def generate(context, builder, signature, args):
        x_, offset, count, y_, to = args
        half = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        upper = builder.add(offset, offset.type(BLOCK))
        low, high = (load(context, builder, x, x_, start, half) for start in (offset, upper))
        words = rounded_words(builder, low, high)
        # the lower half of a word is the first number of its pair
        left = splat(builder, builder.trunc(count, INT), BLOCK)
        odd, even = builder.shl(words, ints(BLOCK, 16)), builder.lshr(words, ints(BLOCK, 16))
        rounded = []
        for start, part in enumerate((odd, even)):
            number = ir.Constant(words.type, list(range(start, 2 * BLOCK, 2)))
            shown = builder.icmp_signed("<", number, left)
            rounded.append(builder.select(shown, part, ints(BLOCK, 0)))
        store(context, builder, y, y_, to, builder.bitcast(builder.or_(*rounded), half))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, y, index), generate


def _pairs(builder: Any, odd: Any, even: Any) -> Any:
    """Pack vectors of bfloat16 bits as pairs, each in a word of type float32."""
    wide = ir.VectorType(INT, odd.type.count)
    high = builder.shl(builder.zext(odd, wide), ints(wide.count, 16))
    bits = builder.or_(high, builder.zext(even, wide))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), wide.count))


def _numbers(builder: Any, value: Any) -> Any:
    """Widen bfloat16 bits to float32; return other numbers unchanged."""
    if not isinstance(value.type.element, ir.IntType):
        return value
    wide = ir.VectorType(INT, value.type.count)
    bits = builder.shl(builder.zext(value, wide), ints(wide.count, 16))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), wide.count))
