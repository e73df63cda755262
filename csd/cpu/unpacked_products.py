"""x W^T + b for a few rows and a plain weight [N, K] of a user's module, which is not copied.

As in `products.py` a row's bits depend neither on other rows nor on the threads. Sums are taken in
another order than there, so laid-out weights give other bits.
"""

import numpy as np
import torch
from numba import prange

from csd.cpu.compiled import loop
from csd.cpu.dots import ROWS, dots
from csd.cpu.tensor_access import memory, readable
from csd.cpu.threads import by_threads
from csd.cpu.tiles import COLUMNS, LANES, in_pairs

DTYPES = (torch.bfloat16, torch.float32)
# most rows that are multiplied with a block of columns before the next block is read
MOST = 12 * ROWS


@by_threads
def _product(
    shape,  # M, N, K
    x,  # [M, K]
    apart,  # [M, K] float32, written: x of bfloat16 by `_lay_apart`, for "fma"
    weight,  # [N, K]
    bias,  # [N] float32, or 0 for none
    y,  # [M, N], written
    like,
    isa,  # one of `tiles.ISA`
):
    """y = x W^T + bias; all tensors are addresses, like an array of the dtype of x, weight, y."""
    M, N, K = shape
    row = K * like.itemsize
    steps = row // (4 * LANES)
    source, width = x, row
    if not in_pairs(isa) and like.itemsize == 2:
        _lay_apart(M * K, x, apart)
        source, width = apart, 4 * K
    passes = -(-M // MOST)
    most = -(-M // passes)
    for top in range(0, M, most):
        left = min(most, M - top)
        tiles = -(-left // ROWS)
        each = -(-left // tiles)
        for c in prange(N // COLUMNS):
            first = c * COLUMNS
            start = bias + 4 * first if bias else 0
            for t in range(tiles):
                r = top + t * each
                rows = min(each, left - t * each)
                out = y + (r * N + first) * like.itemsize
                offset = source + r * width
                dots(rows, steps, offset, weight + first * row, start, out, N, like, isa)


@loop
def _lay_apart(count, x, y):
    """Write each 2 LANES bfloat16 numbers as float32: the even ones, then the odd ones."""
    words = memory(x, count // 2, np.empty(0, np.uint32))
    to = memory(y, count, np.empty(0, np.uint32))
    for first in range(0, count // 2, LANES):
        given, even = words[first : first + LANES], to[2 * first : 2 * first + LANES]
        odd = to[2 * first + LANES : 2 * first + 2 * LANES]
        for j in range(LANES):
            even[j] = np.uint32(given[j] << np.uint32(16))
            odd[j] = given[j] & np.uint32(0xFFFF0000)


def fits(weight: torch.Tensor) -> bool:
    """True if the loop can multiply a weight [N, K] in its present memory layout."""
    if weight.dtype not in DTYPES or not readable(weight) or weight.layout != torch.strided:
        return False
    N, K = weight.shape
    whole = N % COLUMNS == 0 and K * weight.itemsize % (4 * LANES) == 0
    return whole and weight.is_contiguous()
