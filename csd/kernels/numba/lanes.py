"""LLVM vectors as numba values: numba's own loops do not keep such sums in registers.

LLVM compiles them to instructions of the CPU at hand, on any CPU. Arrays are flat and contiguous,
and a negative index does not count from the end.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from csd.kernels.numba.simd import BYTE, add_product, prefetch, splat

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
