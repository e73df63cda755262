"""Rearrangement of blocks for products: widened, transposed, or in pairs of bfloat16."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from csd.kernels.numba.lanes import BLOCK, load, store
from csd.kernels.numba.simd import INT, ints, places, rounded_words, splat


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
        words = rounded_words(
            builder,
            *(
                load(context, builder, x, x_, offset_of_half, half)
                for offset_of_half in (offset, upper)
            ),
        )
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
