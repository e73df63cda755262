"""Products of several rows with a tile of numbers; sums are kept in the CPU's registers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.cpu.lanes import BLOCK, FLOATS, WIDTH, load, pointer, store
from csd.cpu.tiles import is_dot
from csd.cpu.vectors import add_product, for_rows, splat

# blocks of WIDTH columns
BLOCKS = WIDTH // BLOCK


@intrinsic
def add_four_rows(typing_context, x, i, end, x_offset, terms, tile, wide, offset, y, y_offset, isa):
    """y[r, y_offset + j] += sum over t of x[r, x_offset + t] tile[t wide + offset + j], in order.

    For r from i to i + 3 and j < WIDTH; rows from `end` on repeat the last one. With "dot" of
    `tiles.ISA` x and tile hold pairs of bfloat16.
    """

    def generate(context, builder, signature, args):
        _add_rows(context, builder, (x, tile, y, isa), args, 4, BLOCKS)
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, *[index] * 4, tile, index, index, y, index, isa), generate


@intrinsic
def add_eight_rows(
    typing_context, blocks, x, i, end, x_offset, terms, tile, wide, offset, y, y_offset, isa
):
    """`add_four_rows` for eight rows and `blocks` times BLOCK columns, fewer than WIDTH."""

    def generate(context, builder, signature, args):
        def some_blocks(count):
            _add_rows(context, builder, (x, tile, y, isa), args[1:], 8, count)

        for_rows(builder, args[0], BLOCKS - 1, some_blocks)
        return context.get_dummy_value()

    index = types.intp
    return types.none(index, x, *[index] * 4, tile, index, index, y, index, isa), generate


def _add_rows(
    context: Any, builder: Any, kinds: tuple[types.Array, ...], args: Any, rows: int, blocks: int
) -> None:
    """Emit the code for `rows` rows and `blocks` blocks of columns."""
    x, tile, y, isa = kinds
    x_, first, end, x_offset, terms, tile_, wide, offset, y_, y_offset, _ = args
    vector, pairs = ir.VectorType(FLOATS[y.dtype], BLOCK), is_dot(isa)
    columns = [end.type(block * BLOCK) for block in range(blocks)]

    def width(kind: types.Array, array: Any) -> Any:
        shape = context.make_array(kind)(context, builder, array).shape
        return cgutils.unpack_tuple(builder, shape)[1]

    last = builder.sub(end, end.type(1))
    each = [builder.add(first, first.type(r)) for r in range(rows)]
    each = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in each]
    given = [builder.add(builder.mul(r, width(x, x_)), x_offset) for r in each]
    starts = [builder.add(builder.mul(r, width(y, y_)), y_offset) for r in each]
    to = [[builder.add(start, column) for column in columns] for start in starts]
    sums = [
        [cgutils.alloca_once_value(builder, load(context, builder, y, y_, place, vector))
         for place in row]
        for row in to
    ]  # fmt: skip
    with cgutils.for_range(builder, terms) as loop:
        start = builder.add(builder.mul(loop.index, wide), offset)
        parts = [
            load(context, builder, tile, tile_, builder.add(start, column), vector)
            for column in columns
        ]
        for row, place in zip(sums, given, strict=True):
            place = builder.add(place, loop.index)
            number = builder.load(pointer(context, builder, x, x_, place, vector.element))
            number = splat(builder, number, BLOCK)
            for total, part in zip(row, parts, strict=True):
                added = add_product(builder, builder.load(total), number, part, pairs)
                builder.store(added, total)
    for row, places in zip(sums, to, strict=True):
        for total, place in zip(row, places, strict=True):
            store(context, builder, y, y_, place, builder.load(total))
