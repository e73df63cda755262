"""Functions that numba's loops call: e^x, maximum, sum, a stable sort and keyed noise.

The sort is csd's own, since numba's takes seconds to compile for each type of array. The noise is
that of `csd.kernels.common.noise`: one word per call, or the words of adjacent tokens, whose rounds
are compiled to vector instructions.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from csd.kernels.common.noise import BUMPS, FACTORS
from csd.kernels.numba.jit import any_order, loop
from csd.kernels.numba.simd import exponential

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# constants, with which the compiler unrolls the rounds
ROUNDS, FACTOR_A, FACTOR_C = len(BUMPS), np.uint64(FACTORS[0]), np.uint64(FACTORS[1])


@loop
def philox_word(key, token, position, sample, stream):
    """Philox word of (key, token, position, sample, stream): a uint32 value as uint64."""
    low, high = np.uint64(key) & LOW, np.uint64(key) >> HALF
    a, b, c, d = np.uint64(token >> 2), np.uint64(position), np.uint64(sample), np.uint64(stream)
    for r in range(BUMPS.shape[0]):
        x, y = a * FACTORS[0], c * FACTORS[1]
        a = (y >> HALF) ^ b ^ ((low + BUMPS[r, 0]) & LOW)
        c = (x >> HALF) ^ d ^ ((high + BUMPS[r, 1]) & LOW)
        b, d = y & LOW, x & LOW
    lane = token & 3
    return (a if lane == 0 else b) if lane < 2 else (c if lane == 2 else d)


@loop
def philox_words(key, first, position, sample, stream, out):
    """Write the words of the tokens from `first`, a multiple of 4, to out [a multiple of 4]."""
    low, high = np.uint64(key) & LOW, np.uint64(key) >> HALF
    for i in range(out.shape[0] // 4):
        a, b = np.uint64(first // 4 + i), np.uint64(position)
        c, d = np.uint64(sample), np.uint64(stream)
        for r in range(ROUNDS):
            x, y = a * FACTOR_A, c * FACTOR_C
            a = (y >> HALF) ^ b ^ ((low + BUMPS[r, 0]) & LOW)
            c = (x >> HALF) ^ d ^ ((high + BUMPS[r, 1]) & LOW)
            b, d = y & LOW, x & LOW
        out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3] = a, b, c, d


@loop
def gumbel(word, kind):
    """Gumbel value of a word; kind: np.float32 or np.float64, the type of the result."""
    half, scale, one = kind(0.5), kind(2.0**-32), kind(1)
    v, u = (kind(word) + half) * scale, (kind(LOW - word) + half) * scale
    if v < kind(2.0**-10):
        series = kind(1 / 3) + v * (kind(1 / 4) + v / kind(5))
        return -np.log(v * (one + v * (half + v * series)))
    return -np.log(-np.log(u if v > half else one - v))


# length of runs that are sorted by insertion before they are merged
RUN = 8


def exp(x: Any) -> Any:
    """e^x, for float32 by the code of `simd.py`."""


def ordered(x: Any) -> Any:
    """Maps numbers to integers in the same order: compilers vectorize maxima of integers."""


def number(x: Any) -> Any:
    """The inverse of `ordered`."""


@overload(ordered)
def _ordered(x):
    if x == types.float64:
        return lambda x: _flip_double(np.float64(x).view(np.int64))
    return lambda x: _flip_single(np.float32(x).view(np.int32))


@overload(number)
def _number(x):
    if x == types.int64:
        return lambda x: np.int64(_flip_double(np.int64(x))).view(np.float64)
    return lambda x: np.int32(_flip_single(np.int32(x))).view(np.float32)


@register_jitable
def _flip_single(bits):
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@register_jitable
def _flip_double(bits):
    return np.int64(bits ^ ((bits >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF)))


@overload(exp)
def _exp(x):
    return (lambda x: _exp_single(x)) if x == types.float32 else lambda x: np.exp(x)


@intrinsic
def _exp_single(typing_context, x):
    return x(x), lambda context, builder, signature, args: exponential(builder, args[0])


@loop
def peak(x):
    """Maximum of x, or NaN if x has a NaN whose sign is positive."""
    largest = ordered(x[0])
    for j in range(1, x.shape[0]):
        value = ordered(x[j])
        largest = value if value > largest else largest
    return number(largest)


@any_order
def added(x):
    """Sum of x, in an order that depends on its length alone."""
    total = x[0]
    for j in range(1, x.shape[0]):
        total += x[j]
    return total


@loop
def places_in_order(key):
    """Stable ascending argsort of key [n] int64; returns indices [n] int64."""
    n = key.shape[0]
    order, merged = np.empty(n, np.int64), np.empty(n, np.int64)
    for first in range(0, n, RUN):
        for i in range(first, min(first + RUN, n)):
            j = i
            while j > first and key[order[j - 1]] > key[i]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
    width = RUN
    while width < n:
        for first in range(0, n, 2 * width):
            middle, end = min(first + width, n), min(first + 2 * width, n)
            i, j = first, middle
            for k in range(first, end):
                if i < middle and (j >= end or key[order[i]] <= key[order[j]]):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order
