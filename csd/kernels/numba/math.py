"""Functions that numba's loops call: e^x, log x, maximum, sum, a stable sort and keyed noise.

`exp` in float32 and `log` are csd's own, since a library's differ between versions and between
vectors' widths. `log` is computed in float64, within one ulp there, so in float32 it is the
correctly rounded one, except for about one number in 10^8, where it is next to it.

The sort is csd's own, since numba's takes seconds to compile for each type of array. The noise is
that of `csd.kernels.common.noise`: one word per call, or the words of adjacent tokens, whose rounds
are compiled to vector instructions.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from csd.kernels.common.noise import BUMPS, FACTORS
from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import BLOCK, add_to_lane, added_lanes, block, filled, plus
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
        return -log(v * (one + v * (half + v * series)))
    return -log(-log(u if v > half else one - v))


# length of runs that are sorted by insertion before they are merged
RUN = 8


def exp(x: Any) -> Any:
    """e^x, for float32 by the code of `simd.py`."""


def log(x: Any) -> Any:
    """Natural logarithm of a float32 or float64, in its type."""


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


# bits of the least normal float64 at least sqrt(1/2), and ln 2 in two parts, the first of 32 bits
_ROOT = np.int64(0x3FE6A09E667F3BCD)
_LN_2_HIGH, _LN_2_LOW = 0.6931471803691238, 1.9082149292705877e-10
# of log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + 2/5 s^5 + .., for s^2 <= 0.0295
_TERMS = tuple(2 / n for n in range(23, 1, -2))


@overload(log)
def _log(x):
    kind = np.float32 if x == types.float32 else np.float64
    return lambda x: kind(_log_double(np.float64(x)))


@register_jitable
def _log_double(x):
    """log x = n log 2 + log m for x = 2^n m, sqrt(1/2) <= m < sqrt(2), s = (m - 1) / (m + 1)."""
    if not (x > 0 and x < np.inf):
        return x if x == np.inf else np.nan if x != 0 else -np.inf
    below = np.float64(0)
    if x < 2.0**-1022:
        below, x = np.float64(54), x * 2.0**54
    bits = np.float64(x).view(np.int64)
    n = (bits - _ROOT) >> np.int64(52)
    f = np.int64(bits - (n << np.int64(52))).view(np.float64) - 1.0
    s = f / (f + 2.0)
    z, series = s * s, 0.0
    for term in _TERMS:
        series = series * z + term
    n, half = np.float64(n) - below, 0.5 * f * f
    return n * _LN_2_HIGH - ((half - (s * (half + z * series) + n * _LN_2_LOW)) - f)


@loop
def peak(x):
    """Maximum of x, or NaN if x has a NaN whose sign is positive."""
    largest = ordered(x[0])
    for j in range(1, x.shape[0]):
        value = ordered(x[j])
        largest = value if value > largest else largest
    return number(largest)


@loop
def added(x):
    """Sum of x: number j is added in lane j % BLOCK, and then the lanes by `added_lanes`."""
    total = filled(type(x[0])(0))
    whole = x.shape[0] // BLOCK * BLOCK
    for j in range(0, whole, BLOCK):
        total = plus(total, block(x, j))
    for j in range(whole, x.shape[0]):
        total = add_to_lane(total, j - whole, x[j])
    return added_lanes(total)


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
