"""Triton functions that kernels share: noise, selection of the largest, and dependent launch."""

import triton
import triton.language as tl
from triton.language.extra import cuda

LINE = tl.constexpr(128)


@triton.jit
def launch_next():
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    cuda.gdc_wait()


@triton.jit
def prefetch(row_ptr, K, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetches the first AHEAD blocks of BLOCK_K numbers of each row, at most its K numbers.

    row_ptr: [N] pointers to the beginnings of rows of K numbers.
    """
    EACH: tl.constexpr = LINE * 8 // row_ptr.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range(AHEAD * BLOCK_K // EACH):
        ptr = row_ptr + tl.minimum(i * EACH, K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0",
            "=r,l",
            [ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
    """Gumbel value in float32 of uint32 words, with the three cases of `exponential`."""
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


@triton.jit
def keep_largest(
    code,  # [B] int64, values of this block: distinct, but for negative ones
    best,  # [N] int64, the largest of earlier blocks, none of which is in `code`
    COUNT: tl.constexpr,
):
    """[N] int64: the COUNT largest of both, in descending order; -1 where there are fewer."""
    offs_n = tl.arange(0, best.shape[0])
    largest = tl.full([best.shape[0]], -1, tl.int64)
    for i in range(0, COUNT):
        top = tl.maximum(tl.max(code, 0), tl.max(best, 0))
        largest = tl.where(offs_n == i, top, largest)
        code = tl.where(code == top, -1, code)
        best = tl.where(best == top, -1, best)
    return largest


@triton.jit
def keep_largest_sorted(
    code,  # [B] int64, values of this block: distinct, but for negative ones
    best,  # [N] int64, the largest of earlier blocks in descending order, none in `code`
    earlier,  # False for the first block, which needs no merge
    COUNT: tl.constexpr,
):
    """`keep_largest` by `tl.topk` and `tl.sort`, for kernels of one warp. B >= N > 1.

    It takes a quarter of the instructions if one warp holds the block and COUNT is 16, but more
    registers than a kernel of eight warps has.
    """
    N: tl.constexpr = best.shape[0]
    largest = tl.topk(code, N, 0)
    if earlier:
        # the larger ones of the pairs of two descending lists, one reversed, are the N largest
        largest = tl.sort(tl.maximum(best, tl.flip(largest, 0)), 0, descending=True)
    return tl.where(tl.arange(0, N) < COUNT, tl.maximum(largest, -1), -1)
