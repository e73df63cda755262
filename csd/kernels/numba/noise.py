"""The keyed noise of `csd.kernels.common.noise`, one word per call."""

import numpy as np

from csd.kernels.common.noise import BUMPS, FACTORS
from csd.kernels.numba.jit import loop

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


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
def gumbel(word, kind):
    """Gumbel value of a word; kind: np.float32 or np.float64, the type of the result."""
    half, scale, one = kind(0.5), kind(2.0**-32), kind(1)
    v, u = (kind(word) + half) * scale, (kind(LOW - word) + half) * scale
    if v < kind(2.0**-10):
        series = kind(1 / 3) + v * (kind(1 / 4) + v / kind(5))
        return -np.log(v * (one + v * (half + v * series)))
    return -np.log(-np.log(u if v > half else one - v))
