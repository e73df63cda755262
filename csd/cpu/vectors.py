"""LLVM code that the loops share: of vectors, of a case for each number of rows, of prefetching."""

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

# for what is written as assembly
binding.initialize_native_asmparser()

INT, BYTE, FLOAT = ir.IntType(32), ir.IntType(8), ir.FloatType()
# bytes of a line of the cache
LINE = 64
# pairs of bfloat16 in a register
WORDS = 16


def ints(count: int, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(INT, count), [value] * count)


def places(values: Iterable[int]) -> ir.Constant:
    """Indices of a shuffle of two vectors."""
    values = list(values)
    return ir.Constant(ir.VectorType(INT, len(values)), values)


def splat(builder: Any, number: Any, count: int) -> Any:
    """A vector of `count` times a number."""
    nothing = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(nothing, number, INT(0))
    return builder.shuffle_vector(first, nothing, places([0] * count))


def halves(builder: Any, value: Any) -> list[Any]:
    """The lower and the upper half of a vector."""
    half = value.type.count // 2
    return [
        builder.shuffle_vector(value, value, places(range(first, first + half)))
        for first in (0, half)
    ]


def add_product(builder: Any, total: Any, x: Any, y: Any, pairs: bool = False) -> Any:
    """total + x y, rounded once, of vectors of numbers.

    pairs: x and y are pairs of bfloat16 in the place of float32, which AVX512-BF16 multiplies: the
    product of the odd ones is added and rounded, then that of the even ones; denormals are zero.
    """
    kind = total.type
    function = ir.FunctionType(kind, [kind] * 3)
    if not pairs:
        bits = 64 if isinstance(kind.element, ir.DoubleType) else 32
        name = f"llvm.fma.v{kind.count}f{bits}"
        fma = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.call(fma, [x, y, total])
    # LLVM's intrinsic takes other types in each version, so it is written as assembly
    return builder.call(ir.InlineAsm(function, "vdpbf16ps $2, $1, $0", "=v,v,v,0"), [x, y, total])


def for_rows(builder: Any, rows: Any, most: int, emit: Callable[[int], None]) -> None:
    """Code of `emit` for each number of rows from 1 to `most`; `rows` picks one of them."""
    done = builder.append_basic_block("done")
    found = builder.switch(rows, done)
    for count in range(1, most + 1):
        block = builder.append_basic_block(f"rows_{count}")
        found.add_case(rows.type(count), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(done)
    builder.position_at_end(done)


def rounded(builder: Any, value: Any) -> Any:
    """The upper halves of a vector of float32, rounded to the nearest, ties to even.

    NaNs stay such: those that a sum has of bfloat16 have no bits in their lower halves.
    """
    count = value.type.count
    bits = builder.bitcast(value, ir.VectorType(INT, count))
    odd = builder.and_(builder.lshr(bits, ints(count, 16)), ints(count, 1))
    up = builder.add(builder.add(bits, ints(count, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(up, ints(count, 16)), ir.VectorType(ir.IntType(16), count))


def rounded_words(builder: Any, low: Any, high: Any) -> Any:
    """`rounded` of two vectors of WORDS, low's numbers in the lower words, by AVX512-BF16.

    Denormals are zero, as they are to its products. A word's lower half is the number before.
    """
    kind = low.type
    code = ir.InlineAsm(ir.FunctionType(kind, [kind] * 2), "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
    return builder.bitcast(builder.call(code, [low, high]), ir.VectorType(INT, WORDS))


def prefetch(builder: Any, pointer: Any, level: int = 2) -> None:
    """Asks for the line at a pointer to a byte, into the first or the second level of caches."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", kind.args[:1], kind)
    read, locality, data = INT(0), INT(4 - level), INT(1)
    builder.call(function, [pointer, read, locality, data])
