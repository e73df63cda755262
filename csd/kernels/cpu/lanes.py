"""Several numbers in one value, as LLVM's vectors: what numba's own loops do not keep in registers.

LLVM makes instructions of the CPU at hand of them, on any CPU. Arrays are flat, in one piece, and
an index is taken as it is: a negative one is not from the end.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from csd.kernels.cpu.vectors import BYTE, INT, places, prefetch, splat

# numbers side by side: four rows of sums of as many fill the registers
FEATURES = config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
CPU: str = llvm.get_host_cpu_name()
WIDTH = 64 if "+avx512f" in FEATURES else 16
# keys and numbers of a head that are turned at once
BLOCK = 16

FLOATS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


class Lanes(types.Type):
    """`count` numbers of a dtype."""

    def __init__(self, dtype: types.Type, count: int):
        self.dtype, self.count = dtype, count
        super().__init__(f"lanes({dtype}, {count})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes):
        super().__init__(manager, lanes, ir.VectorType(FLOATS[lanes.dtype], lanes.count))


@intrinsic
def lanes(typing_context, x, at):
    """x[at : at + WIDTH]"""
    return _lanes(x, WIDTH)


@intrinsic
def block(typing_context, x, at):
    """x[at : at + BLOCK]"""
    return _lanes(x, BLOCK)


def _lanes(x: types.Array, count: int) -> tuple[Any, Any]:
    found = Lanes(x.dtype, count)

    def generate(context, builder, signature, args):
        return _load(context, builder, x, *args, context.get_value_type(found))

    return found(x, types.intp), generate


@intrinsic
def put(typing_context, value, x, at):
    """x[at : at + WIDTH] = value"""

    def generate(context, builder, signature, args):
        _store(context, builder, x, *args[1:], args[0])
        return context.get_dummy_value()

    return types.none(value, x, types.intp), generate


@intrinsic
def add_multiple(typing_context, total, x, row):
    """total + x row for a number x, rounded once."""

    def generate(context, builder, signature, args):
        return _add_multiple(builder, *args)

    return total(total, row.dtype, row), generate


@intrinsic
def add_four_rows(typing_context, x, i, end, x_at, terms, tile, wide, at, y, y_at):
    """y[r, y_at : y_at + WIDTH] += sum over t of x[r, x_at + t] tile[t wide + at :] in that order

    For r from i to i + 3; from `end` on the last row is done again.
    """
    return _add_rows(4, WIDTH, x, tile, y)


@intrinsic
def add_eight_rows(typing_context, x, i, end, x_at, terms, tile, wide, at, y, y_at):
    """`add_four_rows` of eight rows and BLOCK columns."""
    return _add_rows(8, BLOCK, x, tile, y)


def _add_rows(
    count: int, width: int, x: types.Array, tile: types.Array, y: types.Array
) -> tuple[Any, Any]:
    vector = ir.VectorType(FLOATS[y.dtype], width)

    def generate(context, builder, signature, args):
        x_, first, end, x_at, terms, tile_, wide, at, y_, y_at = args

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
            cgutils.alloca_once_value(builder, _load(context, builder, y, y_, place, vector))
            for place in to
        ]
        with cgutils.for_range(builder, terms) as loop:
            place = builder.add(builder.mul(loop.index, wide), at)
            row = _load(context, builder, tile, tile_, place, vector)
            for total, start in zip(sums, given, strict=True):
                place = builder.add(start, loop.index)
                number = builder.load(_pointer(context, builder, x, x_, place, vector.element))
                builder.store(_add_multiple(builder, builder.load(total), number, row), total)
        for total, place in zip(sums, to, strict=True):
            _store(context, builder, y, y_, place, builder.load(total))
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, *[index] * 4, tile, index, index, y, index), generate


@intrinsic
def widen(typing_context, x, at, y, to):
    """y[to : to + BLOCK] = x[at : at + BLOCK] as numbers"""

    def generate(context, builder, signature, args):
        given = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        value = _numbers(builder, _load(context, builder, x, args[0], args[1], given))
        _store(context, builder, y, args[2], args[3], value)
        return context.get_dummy_value()

    return types.none(x, types.intp, y, types.intp), generate


@intrinsic
def turn(typing_context, x, at, stride, last, y, to, y_stride):
    """y[to + d y_stride + j] = x[at + min(j, last) stride + d] as a number, for j, d < BLOCK

    Rows j and j + BLOCK / 2 are interleaved; after four such rounds each is a column.
    """

    def generate(context, builder, signature, args):
        x_, at, stride, last, y_, to, y_stride = args
        given = ir.VectorType(context.get_value_type(x.dtype), BLOCK)
        rows = []
        for j in range(BLOCK):
            least = builder.select(builder.icmp_signed("<", last, last.type(j)), last, last.type(j))
            start = builder.add(at, builder.mul(least, stride))
            rows.append(_numbers(builder, _load(context, builder, x, x_, start, given)))
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
            _store(context, builder, y, y_, start, row)
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, index, index, index, y, index, index), generate


@intrinsic
def fetch(typing_context, x, at):
    """Asks for the cache line of x[at], which is read soon."""

    def generate(context, builder, signature, args):
        prefetch(builder, _pointer(context, builder, x, *args, BYTE), level=1)
        return context.get_dummy_value()

    return types.none(x, types.intp), generate


def _add_multiple(builder: Any, total: Any, x: Any, row: Any) -> Any:
    kind = row.type
    bits = 64 if isinstance(kind.element, ir.DoubleType) else 32
    function, name = ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{kind.count}f{bits}"
    fma = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(fma, [splat(builder, x, kind.count), row, total])


def _numbers(builder: Any, value: Any) -> Any:
    """Bits of bfloat16 as float32; other numbers as they are."""
    if not isinstance(value.type.element, ir.IntType):
        return value
    wide = ir.VectorType(INT, value.type.count)
    bits = builder.shl(builder.zext(value, wide), ir.Constant(wide, [16] * wide.count))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), wide.count))


def _load(context: Any, builder: Any, kind: types.Array, x: Any, at: Any, vector: Any) -> Any:
    return builder.load(_pointer(context, builder, kind, x, at, vector), align=_bytes(kind))


def _store(context: Any, builder: Any, kind: types.Array, x: Any, at: Any, value: Any) -> None:
    builder.store(value, _pointer(context, builder, kind, x, at, value.type), align=_bytes(kind))


def _pointer(context: Any, builder: Any, kind: types.Array, x: Any, at: Any, vector: Any) -> Any:
    array = context.make_array(kind)(context, builder, x)
    return builder.bitcast(builder.gep(array.data, [at]), vector.as_pointer())


def _bytes(kind: types.Array) -> int:
    return kind.dtype.bitwidth // 8
