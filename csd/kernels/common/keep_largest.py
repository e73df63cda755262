"""The largest of many values, for kernels that read the values block by block."""

import triton
import triton.language as tl


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
        # of two descending lists, one reversed, the larger of each pair are the N largest
        largest = tl.sort(tl.maximum(best, tl.flip(largest, 0)), 0, descending=True)
    return tl.where(tl.arange(0, N) < COUNT, tl.maximum(largest, -1), -1)
