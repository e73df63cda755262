"""Sums of several rows with a block of pairs, in AMX's tile registers: attention's products."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.cpu import amx
from csd.kernels.cpu.amx import DEPTH, LONG, LOWER, ROWS, TILE, UPPER
from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.lanes import pointer
from csd.kernels.cpu.vectors import BYTE, LINE

# of the numbers of x and of a block, in the place of float32
PAIRS = DEPTH // 2


@loop
def add_by_amx(x, low, high, x_at, steps, block, wide, columns, y, y_at, fresh, told):
    """y[low:high, y_at:] += the products of x[low:high, x_at:] and a block, 32 terms at a time.

    x, block: pairs of bfloat16 in the place of float32, of which `steps` times PAIRS are taken;
    block: [pairs, wide]. Columns are taken 2 TILE at a time. fresh: y is written, not added to.
    told: [1], for how many rows the CPU was told the tiles' shapes last: it is told only of others.
    """
    for i in range(low, high, ROWS):
        rows = min(ROWS, high - i)
        if told[0] != rows:
            told[0] = rows
            _tell_shape(rows)
        for at in range(0, columns, 2 * TILE):
            _add_tiles(rows, x, i, x_at, steps, block, wide, at, y, y_at + at, fresh)


@intrinsic
def end_amx(typing_context, by):
    """Behind the last of `add_by_amx` in a thread; nothing by other instructions."""

    def generate(context, builder, signature, args):
        if by.dtype == types.uint8:
            amx.release(builder)
        return context.get_dummy_value()

    return types.none(by), generate


@intrinsic
def _tell_shape(typing_context, rows):
    def generate(context, builder, signature, args):
        amx.configure(builder, args[0])
        return context.get_dummy_value()

    return types.none(types.intp), generate


@intrinsic
def _add_tiles(typing_context, rows, x, i, x_at, steps, block, wide, at, y, y_at, fresh):
    """One or two row tiles of `add_by_amx` with two tiles of columns, which begin at `at`."""

    def generate(context, builder, signature, args):
        rows, x_, i, x_at, steps, block_, wide, at, y_, y_at, fresh = args
        x_start, x_row = _place(context, builder, x, x_, i, x_at)
        y_start, y_row = _place(context, builder, y, y_, i, y_at)
        start = builder.ptrtoint(pointer(context, builder, block, block_, at, BYTE), LONG)
        stride = builder.mul(wide, LONG(4))
        depth = builder.mul(stride, LONG(PAIRS))

        def of(count: int) -> None:
            places = [
                (tile, builder.add(y_start, builder.add(
                    builder.mul(y_row, LONG(group * TILE)), LONG(half * LINE))))
                for group, tiles in enumerate((UPPER, LOWER)[:count])
                for half, tile in enumerate(tiles)
            ]  # fmt: skip
            with builder.if_else(fresh) as (new, old):
                with new:
                    for tile, _ in places:
                        amx.clear_tile(builder, tile)
                with old:
                    for tile, to in places:
                        amx.load_tile(builder, tile, to, y_row)
            with cgutils.for_range(builder, steps) as step:
                left = builder.add(x_start, builder.mul(step.index, LONG(LINE)))
                right = builder.add(start, builder.mul(step.index, depth))
                amx.add_step(builder, count, left, x_row, right, stride)
            for tile, to in places:
                amx.store_tile(builder, tile, to, y_row)

        many = builder.icmp_signed(">", rows, LONG(TILE))
        with builder.if_else(many) as (two, one):
            for count, branch in ((2, two), (1, one)):
                with branch:
                    of(count)
        return context.get_dummy_value()

    index = types.intp
    args = (index, x, *[index] * 3, block, index, index, y, index, types.boolean)
    return types.none(*args), generate


def _place(
    context: Any, builder: Any, kind: types.Array, array: Any, row: Any, at: Any
) -> tuple[ir.Value, ir.Value]:
    """The address of array[row, at], and the bytes of a row."""
    shape = context.make_array(kind)(context, builder, array).shape
    width = cgutils.unpack_tuple(builder, shape)[1]
    index = builder.add(builder.mul(row, width), at)
    address = builder.ptrtoint(pointer(context, builder, kind, array, index, BYTE), LONG)
    return address, builder.mul(width, LONG(4))
