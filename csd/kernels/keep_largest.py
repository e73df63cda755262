"""The largest of many values inside kernels that see them a block at a time."""

import triton
import triton.language as tl


@triton.jit
def keep_largest(
    code,  # [B] int64, all that are not negative different
    best,  # [N] int64, those of earlier blocks, which none of `code` equals
    COUNT: tl.constexpr,
):
    """[N] int64: the COUNT largest of both, down; -1 where there are no more."""
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
    code,  # [B] int64, all that are not negative different
    best,  # [N] int64, those of earlier blocks, down, which none of `code` equals
    earlier,  # whether there were any: one block alone is sorted once
    COUNT: tl.constexpr,
):
    """`keep_largest` in a quarter of its instructions where one warp has the block and COUNT is 16;
    it takes registers that a kernel of eight warps does not have. B >= N > 1."""
    N: tl.constexpr = best.shape[0]
    largest = tl.topk(code, N, 0)
    if earlier:
        # of two falling rows, the larger of each pair are the N largest
        largest = tl.sort(tl.maximum(best, tl.flip(largest, 0)), 0, descending=True)
    return tl.where(tl.arange(0, N) < COUNT, tl.maximum(largest, -1), -1)
