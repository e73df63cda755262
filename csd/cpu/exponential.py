"""LLVM code of e^x in float32, for a number or a vector, with the same bits in both.

e^x = 2^n e^r with x = n ln 2 + r; e^r is Taylor's polynomial of degree 7, whose error is 5e-9 at
|r| = ln 2 / 2. The result is within one or two ulp; it is 0 below `LEAST` and NaN for NaN.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from csd.cpu.vectors import FLOAT, INT

LOG2_E = 1.4426950408889634
# ln 2 as the sum of two parts, the first of few bits
LN_2_HIGH, LN_2_LOW = 355 / 512, -2.12194440054690583e-4
# Taylor's coefficients, highest power first, times two: 2^128 is not a float32, but 2^127 is
FACTORS = [2 / n for n in (5040, 720, 120, 24, 6, 2, 1, 1)]
# adding it rounds a float32 to an integer, which the lowest bits of the sum hold
ROUND = 1.5 * 2**23
# least x for which 2^(n - 1) is a normal float32, and an x for which e^x is infinite
LEAST, MOST = -86.98, 89.0


def exponential(builder: Any, given: Any) -> Any:
    """Code of e^given; given: a float32 or a vector of float32."""
    kind = given.type
    ints = ir.VectorType(INT, kind.count) if isinstance(kind, ir.VectorType) else INT
    high = _all(kind, MOST)
    x = builder.select(builder.fcmp_ordered("<", high, given), high, given)
    shifted = _fma(builder, x, _all(kind, LOG2_E), _all(kind, ROUND))
    n = builder.fsub(shifted, _all(kind, ROUND))
    r = _fma(builder, n, _all(kind, -LN_2_HIGH), x)
    r = _fma(builder, n, _all(kind, -LN_2_LOW), r)
    p = _all(kind, FACTORS[0])
    for factor in FACTORS[1:]:
        p = _fma(builder, p, r, _all(kind, factor))
    power = builder.shl(builder.bitcast(shifted, ints), _all(ints, 23))
    power = builder.add(power, _all(ints, 126 << 23))
    p = builder.fmul(p, builder.bitcast(power, kind))
    # below LEAST p is meaningless; the comparison is unordered, so NaN passes
    is_seen = builder.fcmp_unordered(">=", given, _all(kind, LEAST))
    return builder.select(is_seen, p, _all(kind, 0.0))


def _all(kind: Any, number: float) -> ir.Constant:
    """A number as a constant of a type, repeated if that is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [_all(kind.element, number)] * kind.count)
    return ir.Constant(kind, float(np.float32(number)) if kind == FLOAT else number)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Code of a b + c, rounded once, wherever the compiler places it."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [a, b, c])
