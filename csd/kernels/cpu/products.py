"""x W^T + b of a few rows, in a loop that reads a weight once and holds up to ROWS rows' sums.

A sum of a row and a column is taken in the order of k, with one rounding a product: its bits depend
neither on how many rows there are, nor on the threads, nor on the width of the CPU's vectors.

A step's rows are few, so its time is that of reading the weights; those of a block of columns lie
in the order in which they are read. In bfloat16 they become float32 on the way: Intel's own
instruction multiplies twice as many numbers, but took more than twice the time where it was tried.
`python -m bench.products` has both.
"""

import numpy as np
import torch
from numba import prange

from csd.kernels.cpu.lanes import BLOCK, turn
from csd.kernels.cpu.numbers import LIKE, loop, memory, readable
from csd.kernels.cpu.threads import by_threads
from csd.kernels.cpu.tiles import COLUMNS, LANES, ROWS, tile

DTYPES = (torch.bfloat16, torch.float32)
# rows that are multiplied with a block of columns before the next one is read
MOST = 6 * ROWS
# bytes between what is multiplied and what is asked for
AHEAD = 4096


@by_threads
def _product(
    shape,  # M, N, K
    x,  # [M, K]
    turned,  # [room(M, K)] float32, written: of the rows of each tile, [K, rows]
    weight,  # [N / COLUMNS, K, COLUMNS]
    bias,  # [N] float32, or 0 for none
    y,  # [M, N], written
    like,
):
    M, N, K = shape
    passes = -(-M // MOST)
    most = -(-M // passes)
    zeros = np.zeros(COLUMNS, np.float32)
    size = COLUMNS * K * like.itemsize
    for top in range(0, M, most):
        left = min(most, M - top)
        tiles = -(-left // ROWS)
        each = -(-left // tiles)
        _turn_rows(left, each, K, x + top * K * like.itemsize, turned, like)
        for c in prange(N // COLUMNS):
            block = weight + c * size
            start = bias + c * COLUMNS * 4 if bias else zeros.ctypes.data
            for t in range(tiles):
                first = t * each
                rows = min(each, left - first)
                # the lines further on in this block, or of each tile its share of the next one's
                step = size // K // tiles
                ahead = block + AHEAD if tiles == 1 else block + size + t * step * K
                out = y + ((top + first) * N + c * COLUMNS) * like.itemsize
                tile(rows, K, turned + first * K * 4, block, start, out, N, ahead, step, like)


@loop
def _turn_rows(rows, each, K, x, turned, like):
    """Of `each` rows after another, [K, each] in float32."""
    given = memory(x, rows * K, like)
    to = memory(turned, rows * K + BLOCK, np.empty(0, np.float32))
    for first in range(0, rows, each):
        count = min(each, rows - first)
        for k in range(0, K, BLOCK):
            turn(given, first * K + k, K, count - 1, to, first * K + k * count, count)


def room(rows: int, K: int) -> int:
    """Numbers of float32 that the product of so many rows works in."""
    return min(rows, MOST) * K + BLOCK


def fits(weight: torch.Tensor) -> bool:
    """Whether the loop multiplies a weight [N, K]."""
    N, K = weight.shape
    return weight.dtype in DTYPES and readable(weight) and N % COLUMNS == 0 and K % BLOCK == 0


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """weight: [N, K]. Returns [N / COLUMNS, K, COLUMNS], as the loop reads it."""
    K = weight.shape[1]
    if weight.dtype == torch.float32:
        return weight.view(-1, COLUMNS, K).transpose(1, 2).contiguous()
    pairs = weight.reshape(-1, 2, LANES, K).permute(0, 3, 2, 1)
    return pairs.reshape(-1, K, COLUMNS)


def product(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [N / COLUMNS, K, COLUMNS]
    bias: torch.Tensor | None = None,  # [N]
) -> torch.Tensor:
    """[M, N] in the dtype of x and weight, sums in float32."""
    (M, K), N = x.shape, weight.shape[0] * COLUMNS
    y, x = torch.empty(M, N, dtype=x.dtype), x.contiguous()
    if M == 0:
        return y
    wide = None if bias is None else bias.float()
    turned = torch.empty(room(M, K), dtype=torch.float32)
    _product(
        numbers(weight, M), (M, N, K), x.data_ptr(), turned.data_ptr(), weight.data_ptr(),
        0 if wide is None else wide.data_ptr(), y.data_ptr(), LIKE[x.dtype],
    )  # fmt: skip
    return y


def numbers(weight: torch.Tensor, rows: int) -> int:
    """What a product with a weight takes, in numbers that a loop computes."""
    return weight.numel() * (1 + rows // COLUMNS)
