"""Sums of several rows with a tile of numbers, kept in the CPU's registers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.cpu.lanes import BLOCK, FLOATS, WIDTH, load, pointer, store
from csd.kernels.cpu.vectors import add_product, splat


@intrinsic
def add_four_rows(typing_context, x, i, end, x_at, terms, tile, wide, at, y, y_at, by):
    """y[r, y_at : y_at + WIDTH] += sum over t of x[r, x_at + t] tile[t wide + at :] in that order

    For r from i to i + 3; from `end` on the last row is done again. By "dot" of `tiles.BY` x and
    tile hold pairs of bfloat16.
    """
    return _add_rows(4, WIDTH, x, tile, y, by)


@intrinsic
def add_eight_rows(typing_context, x, i, end, x_at, terms, tile, wide, at, y, y_at, by):
    """`add_four_rows` of eight rows and BLOCK columns."""
    return _add_rows(8, BLOCK, x, tile, y, by)


def _add_rows(
    count: int, width: int, x: types.Array, tile: types.Array, y: types.Array, by: types.Array
) -> tuple[Any, Any]:
    vector, pairs = ir.VectorType(FLOATS[y.dtype], width), by.dtype == types.uint16

    def generate(context, builder, signature, args):
        x_, first, end, x_at, terms, tile_, wide, at, y_, y_at = args[:-1]

        def column(kind: types.Array, array: Any) -> Any:
            return cgutils.unpack_tuple(
                builder, context.make_array(kind)(context, builder, array).shape
            )[1]

        last = builder.sub(end, end.type(1))
        rows = [builder.add(first, first.type(r)) for r in range(count)]
        rows = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in rows]
        to = [builder.add(builder.mul(r, column(y, y_)), y_at) for r in rows]
        given = [builder.add(builder.mul(r, column(x, x_)), x_at) for r in rows]
        sums = [
            cgutils.alloca_once_value(builder, load(context, builder, y, y_, place, vector))
            for place in to
        ]
        with cgutils.for_range(builder, terms) as loop:
            place = builder.add(builder.mul(loop.index, wide), at)
            row = load(context, builder, tile, tile_, place, vector)
            for total, start in zip(sums, given, strict=True):
                place = builder.add(start, loop.index)
                number = builder.load(pointer(context, builder, x, x_, place, vector.element))
                number = splat(builder, number, width)
                builder.store(add_product(builder, builder.load(total), number, row, pairs), total)
        for total, place in zip(sums, to, strict=True):
            store(context, builder, y, y_, place, builder.load(total))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, *[index] * 4, tile, index, index, y, index, by), generate
