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
