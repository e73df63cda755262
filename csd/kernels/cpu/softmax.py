"""A row's weights for its keys, e^(score - the largest), and their sum, in the CPU's vectors."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.lanes import BLOCK, INT32, WIDTH, Lanes, add_multiple, block, lanes, put
from csd.kernels.cpu.numbers import LN_2_HIGH, LN_2_LOW, LOG2_E, ROUND, added

# of Taylor's polynomial, the highest power first
POWERS = [np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1)]


@loop
def softmax(x, old, nodes, word, sums):
    """Writes a row's weights in place of its scores; returns their sum, by which none is divided.

    x: scores of `old` keys and then `nodes` nodes, and room for a block; word: bits of the nodes
    that it attends to; sums: [WIDTH] to work in. A key's position decides where it is added,
    whether it is a node or committed.
    """
    zero, one = type(sums[0])(0), type(sums[0])(1)
    least = type(zero)(-np.inf)
    whole, wide = old // BLOCK * BLOCK, old // WIDTH * WIDTH
    rest = (1 << (old - whole)) - 1
    top = kept(block(x, whole), rest, least)
    for j in range(0, whole, BLOCK):
        top = larger(top, block(x, j))
    for j in range(0, nodes, BLOCK):
        top = larger(top, kept(block(x, old + j), word >> j, least))
    most = largest(top)
    for j in range(0, nodes, BLOCK):
        put(kept(exponentials(block(x, old + j), most), word >> j, zero), x, old + j)
    for j in range(WIDTH):
        sums[j] = 0
    total = lanes(sums, 0)
    for j in range(0, wide, WIDTH):
        weights = exponentials(lanes(x, j), most)
        put(weights, x, j)
        total = add_multiple(total, one, weights)
    put(total, sums, 0)
    for j in range(wide, whole + 1, BLOCK):
        given = block(x, j)
        bits = rest if j == whole else -1
        weights = exponentials(given, most)
        put(kept(weights, bits, given), x, j)
        put(add_multiple(block(sums, j - wide), one, kept(weights, bits, zero)), sums, j - wide)
    # one that is hidden adds zero where the next one is added
    at = old - wide
    for j in range(nodes):
        sums[at & (WIDTH - 1)] += x[old + j]
        at += (word >> j) & 1
    return added(sums)


@intrinsic
def kept(typing_context, x, bits, other):
    """Lanes of x whose bit is set, and of `other`, or that number, where it is not."""

    def generate(context, builder, signature, args):
        given, bits, value = args
        if not isinstance(other, Lanes):
            value = _spread(builder, value, x.count)
        mask = builder.trunc(bits, ir.IntType(x.count))
        mask = builder.bitcast(mask, ir.VectorType(ir.IntType(1), x.count))
        return builder.select(mask, given, value)

    return x(x, types.int64, other), generate


@intrinsic
def larger(typing_context, x, other):
    """The larger of each two lanes, where none is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return x(x, x), generate


@intrinsic
def largest(typing_context, x):
    """The largest lane, where none is NaN."""

    def generate(context, builder, signature, args):
        (value,), half = args, x.count // 2
        while half:
            low, high = (
                builder.shuffle_vector(value, value, _indices(first, half)) for first in (0, half)
            )
            value, half = builder.select(builder.fcmp_ordered(">", low, high), low, high), half // 2
        return builder.extract_element(value, INT32(0))

    return x.dtype(x), generate


@intrinsic
def exponentials(typing_context, x, most):
    """e^(x - most) of each lane, as `numbers.exp` has it to the bit."""

    def generate(context, builder, signature, args):
        value = builder.fsub(args[0], _spread(builder, args[1], x.count))
        if x.dtype == types.float64:
            return _call(builder, "exp", value)
        return _exp(builder, value)

    return x(x, x.dtype), generate


def _exp(builder: Any, given: Any) -> Any:
    """`numbers.exp_single` of vectors."""
    kind = given.type
    ints = ir.VectorType(INT32, kind.count)

    def all_of(number: Any) -> ir.Constant:
        return ir.Constant(kind, [float(number)] * kind.count)

    def shared(number: int) -> ir.Constant:
        return ir.Constant(ints, [number] * kind.count)

    def power(n: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(n, shared(127)), shared(23)), kind)

    low, high = all_of(-87), all_of(89)
    is_normal = builder.fcmp_ordered(">", given, low)
    x = builder.select(is_normal, given, low)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    n = builder.fsub(_call(builder, "fma", x, all_of(LOG2_E), all_of(ROUND)), all_of(ROUND))
    r = _call(builder, "fma", n, all_of(-LN_2_HIGH), x)
    r = _call(builder, "fma", n, all_of(-LN_2_LOW), r)
    p = all_of(POWERS[0])
    for factor in POWERS[1:]:
        p = _call(builder, "fma", p, r, all_of(factor))
    whole = builder.fptosi(n, ints)
    half = builder.ashr(whole, shared(1))
    p = builder.fmul(p, power(half))
    p = builder.fmul(p, power(builder.sub(whole, half)))
    p = builder.select(is_normal, p, all_of(0))
    return builder.select(builder.fcmp_unordered("uno", given, given), given, p)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = args[0].type
    bits = 64 if isinstance(kind.element, ir.DoubleType) else 32
    function = ir.FunctionType(kind, [kind] * len(args))
    name = f"llvm.{name}.v{kind.count}f{bits}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def _spread(builder: Any, number: Any, count: int) -> Any:
    nothing = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(nothing, number, INT32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(INT32, count), None))


def _indices(first: int, count: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(INT32, count), [*range(first, first + count)])
