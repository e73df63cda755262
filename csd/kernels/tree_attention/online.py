"""One step of attention in a tile of rows: load of keys, their scores, the online softmax."""

import triton
import triton.language as tl


@triton.jit
def _tokens(
    pages_ptr, start, kv, offs_n, mask_n,
    K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D]: a head's keys or values from place `start` on, 0 where masked.

    Memory after the last valid token may be NaN, and 0 * NaN is not 0. mask_n: None for no mask.
    """
    # [BLOCK_D]
    offs_d = tl.arange(0, BLOCK_D)
    # [BLOCK_N, BLOCK_D]: 32-bit offsets from one pointer that all elements share
    offs = offs_n[:, None] * (K * D) + offs_d[None, :]
    at = pages_ptr + (start * (K * D) + kv * D) + offs
    if mask_n is not None:
        x = tl.load(at, mask=mask_n[:, None] & (offs_d < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(offs_d < D)[None, :], other=0.0)
    return x.to(DTYPE)


@triton.jit
def _tanh(x):
    """tanh to two units in the last place, which 1 - 2 / (e^2x + 1) does not reach near zero."""
    z = x * x
    # least squares of the relative error up to 0.625
    p = tl.fma(z, -5.71705e-3, 2.0650593e-2)
    p = tl.fma(tl.fma(tl.fma(p, z, -5.37435e-2), z, 0.13331491), z, -0.33333284)
    near = tl.fma(x * z, p, x)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.6, near, tl.where(x > 0.0, far, -far))


@triton.jit
def _scores(q, k, scale, cap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """[R, N]: unscaled scores; with CAP scaled and capped, in base 2 if `cap` is times log2 e."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP:
        return cap * _tanh(score * scale)
    else:
        return score


@triton.jit
def _add_keys(acc, peak, total, score, v, scale, PRECISION: tl.constexpr):
    """One step of the online softmax: acc [R, D], peak [R], total [R], score [R, N], v [N, D].

    Scores and their peak are unscaled: one fma subtracts the peak and applies `scale`.
    """
    top = tl.maximum(peak, tl.max(score, 1))
    # a finite pivot keeps a row without a key so far from computing -inf - -inf
    pivot = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(score, scale, (-pivot * scale)[:, None]))
    # exactly 1 if the peak does not change
    shrink = tl.exp2((peak - pivot) * scale)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total
