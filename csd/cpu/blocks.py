"""Blocks of numbers laid out for products: widened, transposed, and in pairs of bfloat16."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csd.cpu.lanes import BLOCK, load, store
from csd.cpu.vectors import INT, ints, places, rounded_words, splat


@intrinsic
def widen(typing_context, x, offset, y, to):
    """y[to : to + BLOCK] = x[at : at + BLOCK] as numbers"""

    def generate(context, builder, signature, args):
        given = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        value = _numbers(builder, load(context, builder, x, args[0], args[1], given))
        store(context, builder, y, args[2], args[3], value)
        return context.get_dummy_value()

    return types.none(x, types.intp, y, types.intp), generate


@intrinsic
def transpose(typing_context, x, offset, stride, last, y, to, y_stride):
    """y[to + d y_stride + j] = x[at + min(j, last) stride + d] as a number, for j, d < BLOCK

    Rows j and j + BLOCK / 2 are interleaved; after four such rounds each is a column.
    """

    def generate(context, builder, signature, args):
        x_, offset, stride, last, y_, to, y_stride = args
        given = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        rows = []
        for j in range(BLOCK):
            least = builder.select(builder.icmp_signed("<", last, last.type(j)), last, last.type(j))
            start = builder.add(offset, builder.mul(least, stride))
            rows.append(_numbers(builder, load(context, builder, x, x_, start, given)))
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
    """y[to : to + BLOCK] = pairs of x[at :] and x[at + stride :], or of zeros where stride is 0

    x: bfloat16. The first is the odd one of its pair, which is multiplied before the other.
    """

    def generate(context, builder, signature, args):
        x_, offset, stride, y_, to = args
        given = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        odd = load(context, builder, x, x_, offset, given)
        even = load(context, builder, x, x_, builder.add(offset, stride), given)
        is_there = builder.icmp_signed("!=", stride, stride.type(0))
        even = builder.select(is_there, even, ir.Constant(given, [0] * BLOCK))
        store(context, builder, y, y_, to, _pairs(builder, odd, even))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, y, index), generate


@intrinsic
def round_pairs(typing_context, x, offset, count, y, to):
    """y[to : to + BLOCK] = pairs of the numbers of x[at :], rounded, and zeros from `count` on

    Of each pair the odd one is the number that comes first.
    """

    def generate(context, builder, signature, args):
        x_, offset, count, y_, to = args
        half = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        behind = builder.add(offset, offset.type(BLOCK))
        words = rounded_words(
            builder, *(load(context, builder, x, x_, place, half) for place in (offset, behind))
        )
        # the lower half of a word is the number that comes first
        left = splat(builder, builder.trunc(count, INT), BLOCK)
        odd, even = builder.shl(words, ints(BLOCK, 16)), builder.lshr(words, ints(BLOCK, 16))
        kept = []
        for start, part in enumerate((odd, even)):
            number = ir.Constant(words.type, list(range(start, 2 * BLOCK, 2)))
            shown = builder.icmp_signed("<", number, left)
            kept.append(builder.select(shown, part, ints(BLOCK, 0)))
        store(context, builder, y, y_, to, builder.bitcast(builder.or_(*kept), half))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, y, index), generate


def _pairs(builder: Any, odd: Any, even: Any) -> Any:
    """Pairs of bfloat16 in the place of float32."""
    wide = ir.VectorType(INT, odd.type.count)
    high = builder.shl(builder.zext(odd, wide), ints(wide.count, 16))
    bits = builder.or_(high, builder.zext(even, wide))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), wide.count))


def _numbers(builder: Any, value: Any) -> Any:
    """Bits of bfloat16 as float32; other numbers as they are."""
    if not isinstance(value.type.element, ir.IntType):
        return value
    wide = ir.VectorType(INT, value.type.count)
    bits = builder.shl(builder.zext(value, wide), ints(wide.count, 16))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), wide.count))
