"""LLVM code of e^x in float32, of a number or of a vector: the same bits in both.

2^n e^r, x = n ln 2 + r: Taylor's polynomial of degree 7 is off by 5e-9 at |r| = ln 2 / 2. Within an
ulp or two; 0 below float32's normal numbers, NaN of NaN.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from csd.kernels.cpu.vectors import FLOAT, INT

LOG2_E = 1.4426950408889634
# ln 2 in two parts, of which the first has few bits
LN_2_HIGH, LN_2_LOW = 355 / 512, -2.12194440054690583e-4
# Taylor's factors, of the highest power first
FACTORS = [1 / n for n in (5040, 720, 120, 24, 6, 2, 1, 1)]
# added and taken away again, it leaves a float32 a whole number
ROUND = 1.5 * 2**23


def exponential(builder: Any, given: Any) -> Any:
    """e^given; given: a float32, or a vector of some."""
    kind = given.type
    ints = ir.VectorType(INT, kind.count) if isinstance(kind, ir.VectorType) else INT
    low, high = _all(kind, -87.0), _all(kind, 89.0)
    is_normal = builder.fcmp_ordered(">", given, low)
    x = builder.select(is_normal, given, low)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    rounding = _all(kind, ROUND)
    n = builder.fsub(_fma(builder, x, _all(kind, LOG2_E), rounding), rounding)
    r = _fma(builder, n, _all(kind, -LN_2_HIGH), x)
    r = _fma(builder, n, _all(kind, -LN_2_LOW), r)
    p = _all(kind, FACTORS[0])
    for factor in FACTORS[1:]:
        p = _fma(builder, p, r, _all(kind, factor))
    # 2^128 is no float32, but its two halves are
    whole = builder.fptosi(n, ints)
    half = builder.ashr(whole, _all(ints, 1))
    for power in (half, builder.sub(whole, half)):
        bits = builder.shl(builder.add(power, _all(ints, 127)), _all(ints, 23))
        p = builder.fmul(p, builder.bitcast(bits, kind))
    p = builder.select(is_normal, p, _all(kind, 0.0))
    return builder.select(builder.fcmp_unordered("uno", given, given), given, p)


def _all(kind: Any, number: float) -> ir.Constant:
    """A number as a constant of a type, or a vector of it."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [_all(kind.element, number)] * kind.count)
    return ir.Constant(kind, float(np.float32(number)) if kind == FLOAT else number)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once, wherever the compiler puts it."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [a, b, c])
