"""Keyed noise inside kernels: the words and Gumbels of `csd/kernels/noise.py`."""

import triton
import triton.language as tl


@triton.jit
def philox_word(key, token, position, sample, stream):
    """uint32 word of each token >= 0; key: int64, the others: int32, of shapes that broadcast."""
    zero = (token * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        (token >> 2).to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + sample.to(tl.uint32),
        zero + stream,
        zero + key.to(tl.uint32),
        zero + (key >> 32).to(tl.uint32),
    )
    lane = token & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def gumbel64(word):
    """Gumbel value in float64 of uint32 words: float64 holds 1 - v exactly."""
    u = tl.full((), 2.0**32 - 0.5, tl.float64) - word.to(tl.float64)
    u = u * tl.full((), 2.0**-32, tl.float64)
    return -tl.log(-tl.log(u))


@triton.jit
def gumbel32(word):
    """Gumbel value in float32 of uint32 words, by the parts of `exponential`."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * (0.25 + v * 0.2))))
    exact = tl.where(v > 0.5, -tl.log(u), -tl.log(1 - v))
    return -tl.log(tl.where(v < 0.0009765625, series, exact))


@triton.jit
def uniform32(word):
    """(word + 1/2) / 2^32 in float32, below 1."""
    u = (word.to(tl.float64) + 0.5) * tl.full((), 2.0**-32, tl.float64)
    return tl.minimum(u.to(tl.float32), 0.99999994)
