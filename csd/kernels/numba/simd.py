"""LLVM code that loops share: vectors, code for each number of rows, rounding, prefetching, e^x.

`exponential` is e^x in float32, with the same bits for a number and for an element of a vector:
e^x = 2^n e^r with x = n ln 2 + r; e^r is Taylor's polynomial of degree 7, whose error is 5e-9 at
|r| = ln 2 / 2. The result is within one or two ulp; it is 0 below `MIN_ARGUMENT` and NaN for NaN.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

# for inline assembly
binding.initialize_native_asmparser()

INT, BYTE, FLOAT = ir.IntType(32), ir.IntType(8), ir.FloatType()
# bytes of a cache line
LINE = 64
# pairs of bfloat16 in a register
WORDS = 16
LOG2_E = 1.4426950408889634
# ln 2 as the sum of two parts, the first of few bits
LN_2_HIGH, LN_2_LOW = 355 / 512, -2.12194440054690583e-4
# Taylor's coefficients, highest power first, times two: 2^128 is not a float32, but 2^127 is
FACTORS = [2 / n for n in (5040, 720, 120, 24, 6, 2, 1, 1)]
# adding it rounds a float32 to an integer, which the lowest bits of the sum hold
ROUND = 1.5 * 2**23
# least x for which 2^(n - 1) is a normal float32, and an x for which e^x is infinite
MIN_ARGUMENT, MAX_ARGUMENT = -86.98, 89.0


def ints(count: int, value: int) -> ir.Constant:
    """A constant vector of `count` 32-bit integers of one value."""
    return ir.Constant(ir.VectorType(INT, count), [value] * count)


def places(values: Iterable[int]) -> ir.Constant:
    """Indices for a shuffle of two vectors, as a constant."""
    values = list(values)
    return ir.Constant(ir.VectorType(INT, len(values)), values)


def splat(builder: Any, number: Any, count: int) -> Any:
    """A vector of `count` copies of a number."""
    nothing = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(nothing, number, INT(0))
    return builder.shuffle_vector(first, nothing, places([0] * count))


def halves(builder: Any, value: Any) -> list[Any]:
    """The lower and the upper half of a vector, as two vectors."""
    half = value.type.count // 2
    return [
        builder.shuffle_vector(value, value, places(range(first, first + half)))
        for first in (0, half)
    ]


def add_product(builder: Any, total: Any, x: Any, y: Any, pairs: bool = False) -> Any:
    """total + x y for vectors, rounded once.

    pairs: x and y hold pairs of bfloat16 in the place of float32, which AVX512-BF16 multiplies: the
    product of the odd ones is added and rounded, then that of the even ones; denormals are zero.
    """
    if not pairs:
        return fma(builder, x, y, total)
    function = ir.FunctionType(total.type, [total.type] * 3)
    # the types of LLVM's intrinsic differ between versions, so this is inline assembly
    return builder.call(ir.InlineAsm(function, "vdpbf16ps $2, $1, $0", "=v,v,v,0"), [x, y, total])


def for_rows(builder: Any, rows: Any, max_rows: int, emit: Callable[[int], None]) -> None:
    """Emit code for each number of rows from 1 to `max_rows`; `rows` selects a case."""
    done = builder.append_basic_block("done")
    switch = builder.switch(rows, done)
    for count in range(1, max_rows + 1):
        block = builder.append_basic_block(f"rows_{count}")
        switch.add_case(rows.type(count), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(done)
    builder.position_at_end(done)


def rounded(builder: Any, value: Any) -> Any:
    """A vector of float32 rounded to bfloat16, to the nearest, ties to even, as 16-bit integers.

    NaNs remain NaNs: in a sum of bfloat16 products their lower halves have no set bits.
    """
    count = value.type.count
    bits = builder.bitcast(value, ir.VectorType(INT, count))
    odd = builder.and_(builder.lshr(bits, ints(count, 16)), ints(count, 1))
    up = builder.add(builder.add(bits, ints(count, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(up, ints(count, 16)), ir.VectorType(ir.IntType(16), count))


def rounded_words(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of WORDS float32 rounded to bfloat16 by AVX512-BF16, packed in WORDS words.

    low's numbers are in the lower words; a word's lower half is the earlier number. Denormals
    become zero, as in products of AVX512-BF16.
    """
    kind = low.type
    code = ir.InlineAsm(ir.FunctionType(kind, [kind] * 2), "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v")
    return builder.bitcast(builder.call(code, [low, high]), ir.VectorType(INT, WORDS))


def prefetch(builder: Any, pointer: Any, level: int = 2) -> None:
    """Prefetch the cache line at a pointer to a byte into the cache of `level`, 1 or 2."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", kind.args[:1], kind)
    read, locality, data = INT(0), INT(4 - level), INT(1)
    builder.call(function, [pointer, read, locality, data])


def exponential(builder: Any, argument: Any) -> Any:
    """Code of e^given; argument: a float32 or a vector of float32."""
    kind = argument.type
    ints = ir.VectorType(INT, kind.count) if isinstance(kind, ir.VectorType) else INT
    high = _all(kind, MAX_ARGUMENT)
    x = builder.select(builder.fcmp_ordered("<", high, argument), high, argument)
    shifted = fma(builder, x, _all(kind, LOG2_E), _all(kind, ROUND))
    n = builder.fsub(shifted, _all(kind, ROUND))
    r = fma(builder, n, _all(kind, -LN_2_HIGH), x)
    r = fma(builder, n, _all(kind, -LN_2_LOW), r)
    p = _all(kind, FACTORS[0])
    for factor in FACTORS[1:]:
        p = fma(builder, p, r, _all(kind, factor))
    power = builder.shl(builder.bitcast(shifted, ints), _all(ints, 23))
    power = builder.add(power, _all(ints, 126 << 23))
    p = builder.fmul(p, builder.bitcast(power, kind))
    # below MIN_ARGUMENT p is meaningless; the comparison is unordered, so NaN passes
    is_seen = builder.fcmp_unordered(">=", argument, _all(kind, MIN_ARGUMENT))
    return builder.select(is_seen, p, _all(kind, 0.0))


def _all(kind: Any, number: float) -> ir.Constant:
    """A number as a constant of a type, repeated if that is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [_all(kind.element, number)] * kind.count)
    return ir.Constant(kind, float(np.float32(number)) if kind == FLOAT else number)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Code of a b + c, for numbers or vectors, rounded once, wherever the compiler places it."""
    kind = a.type
    vector = isinstance(kind, ir.VectorType)
    bits = 64 if isinstance(kind.element if vector else kind, ir.DoubleType) else 32
    name = f"llvm.fma.v{kind.count}f{bits}" if vector else f"llvm.fma.f{bits}"
    function = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [a, b, c])
