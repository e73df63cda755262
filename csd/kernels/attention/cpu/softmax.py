"""Softmax weights of a row's keys, e^(score - maximum), and their sum, in vector registers."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import BLOCK, block, plus, put, select
from csd.kernels.numba.simd import INT, exponential, halves, splat


@loop
def softmax(x, scale, old, nodes, word, sums):
    """Overwrites a row's scores with its weights, not yet normalised.

    Returns the weights' sum and the largest visible score, which is not scaled.

    x: scores of `old` keys and then `nodes` nodes, to be multiplied by scale > 0, with room for
    another block; word: bits of the nodes that the row attends to; sums: [BLOCK], workspace. A
    key's position decides in which lane it is added, whether it is a node or committed.
    """
    zero = type(sums[0])(0)
    least = type(zero)(-np.inf)
    whole = old // BLOCK * BLOCK
    rest = (1 << (old - whole)) - 1
    top = select(block(x, whole), rest, least)
    for j in range(0, whole, BLOCK):
        top = larger(top, block(x, j))
    for j in range(0, nodes, BLOCK):
        top = larger(top, select(block(x, old + j), word >> j, least))
    peak = largest(top)
    for j in range(0, nodes, BLOCK):
        put(select(exponentials(block(x, old + j), peak, scale), word >> j, zero), x, old + j)
    for j in range(BLOCK):
        sums[j] = 0
    total = block(sums, 0)
    for j in range(0, whole, BLOCK):
        weight = exponentials(block(x, j), peak, scale)
        put(weight, x, j)
        total = plus(total, weight)
    score = block(x, whole)
    weight = exponentials(score, peak, scale)
    put(select(weight, rest, score), x, whole)
    put(plus(total, select(weight, rest, zero)), sums, 0)
    offset = old - whole
    seen = word if nodes == 64 else word & ((1 << nodes) - 1)
    while seen:
        sums[offset & (BLOCK - 1)] += x[old + lowest(seen)]
        offset += 1
        seen &= seen - 1
    return _added(sums), peak


@loop
def _added(x):
    """Sum of x [BLOCK], in the order in which the code for AVX2 has always added."""
    a, b = x[0] + x[1] + x[5] + x[9], x[2] + x[6] + x[10]
    c, d = x[3] + x[7] + x[11], x[4] + x[8] + x[12]
    return ((a + c) + (b + d)) + x[13] + x[14] + x[15]


@intrinsic
def lowest(typing_context, word):
    """Index of the lowest set bit of a word that is not zero."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def larger(typing_context, x, other):
    """Maximum of each pair of lanes, if none is NaN."""
    return x(x, x), lambda _, b, __, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def largest(typing_context, x):
    """Maximum of the lanes, if none is NaN."""

    def generate(context, builder, signature, args):
        (value,) = args
        while value.type.count > 1:
            low, high = halves(builder, value)
            value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(value, INT(0))

    return x.dtype(x), generate


@intrinsic
def exponentials(typing_context, x, peak, scale):
    """e^((x - most) scale) of each lane, equal to `csd.kernels.numba.math.exp` to the bit."""

    def generate(context, builder, signature, args):
        score, *others = args
        top, factor = (splat(builder, number, x.count) for number in others)
        value = builder.fmul(builder.fsub(score, top), factor)
        if x.dtype == types.float32:
            return exponential(builder, value)
        kind = ir.FunctionType(value.type, [value.type])
        name = f"llvm.exp.v{x.count}f64"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])

    return x(x, x.dtype, x.dtype), generate
