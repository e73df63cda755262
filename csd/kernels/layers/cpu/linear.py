"""x W^T + b for a few rows, in a loop that reads a weight once and holds several rows' sums.

The sum of a row and a column is taken in the order of k, so its bits depend neither on the number
of rows nor on the threads. "fma" rounds once per product, whatever the width of the CPU's vectors;
"dot", an instruction for bfloat16, has an order of its own (`csd/kernels/numba/tiles.py`).

A step has few rows, so its time is that of reading the weights; the numbers of a block of columns
are stored in the order in which they are read. `python -m bench products` compares speeds.
"""

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from csd.kernels.layers.cpu.unpacked import fits as plain_fits
from csd.kernels.layers.cpu.unpacked import multiply as multiply_plain
from csd.kernels.layers.quantized.cpu.product import multiply_parts
from csd.kernels.numba.isa import instruction, multiplies
from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import BLOCK, transpose
from csd.kernels.numba.tensors import LIKE, memory, readable
from csd.kernels.numba.threads import by_threads, parts_for, share
from csd.kernels.numba.tiles import COLUMNS, ISA, LANES, ROWS, in_pairs, tile

# most rows that are multiplied with a block of columns before the next block is read
MAX_ROWS = 6 * ROWS
# bytes from the numbers that are multiplied to those that are prefetched
AHEAD = 4096


@loop
def multiply(
    threads,  # number of threads
    shape,  # M, N, K
    x,  # [M, K]
    transposed,  # [scratch_size(M, K)] float32, written: each tile's rows as [K, rows]
    weight,  # [N / COLUMNS, K, COLUMNS], as `by_columns` lays it out
    bias,  # [N] float32, or 0 for none
    y,  # [M, N], written
    like,
    isa,  # one of `tiles.ISA`
):
    """y = x W^T + bias; all tensors are addresses, like an array of the dtype of x, weight, y."""
    M, N, K = shape
    pairs = in_pairs(isa)
    # float32 words of a row; pairs of bfloat16 are moved as float32
    words = K // 2 if pairs else K
    passes = -(-M // MAX_ROWS)
    rows_per_pass = -(-M // passes)
    zeros = np.zeros(COLUMNS, np.float32)
    size = COLUMNS * K * like.itemsize
    for top in range(0, M, rows_per_pass):
        left = min(rows_per_pass, M - top)
        tiles = -(-left // ROWS)
        each = -(-left // tiles)
        source = x + top * K * like.itemsize
        if pairs:
            _transpose_rows(left, each, words, source, transposed, np.empty(0, np.float32))
        else:
            _transpose_rows(left, each, K, source, transposed, like)
        out = y + top * N * like.itemsize
        sizes = N, words, size, left, each
        multiply_columns(threads, sizes, transposed, weight, bias, zeros, out, like, isa)


@by_threads
def _columns(part, parts, sizes, transposed, weight, bias, zeros, y, like, isa):
    """Multiply the tiles of `transposed` with blocks of COLUMNS columns.

    zeros: [COLUMNS] float32. y: [rows, N], written.
    """
    # words of a row; bytes of a block of columns; rows, and rows of a tile
    N, words, size, left, each = sizes
    tiles = -(-left // each)
    begin, end = share(N // COLUMNS, part, parts)
    for c in range(begin, end):
        block = weight + c * size
        start = bias + c * COLUMNS * 4 if bias else zeros.ctypes.data
        for t in range(tiles):
            first = t * each
            rows = min(each, left - first)
            # prefetch later lines of this block, or in each tile a share of the next block
            step = size // words // tiles
            ahead = block + AHEAD if tiles == 1 else block + size + t * step * words
            out = y + (first * N + c * COLUMNS) * like.itemsize
            offset = transposed + first * words * 4
            tile(rows, words, offset, block, start, out, N, ahead, step, like, isa)


multiply_columns = _columns.run


@loop
def _transpose_rows(rows, each, K, x, transposed, like):
    """Transpose rows in blocks of `each`, to [K, each] float32; x and transposed are addresses."""
    source = memory(x, rows * K, like)
    to = memory(transposed, rows * K + BLOCK, np.empty(0, np.float32))
    for first in range(0, rows, each):
        count = min(each, rows - first)
        for k in range(0, K, BLOCK):
            transpose(source, first * K + k, K, count - 1, to, first * K + k * count, count)


def scratch_size(rows: int, K: int, is_plain: bool) -> int:
    """Size of the workspace, in float32 numbers, of a product of `rows` rows."""
    return (rows if is_plain else min(rows, MAX_ROWS)) * K + BLOCK


def fits(weight: torch.Tensor, isa: str | None = None) -> bool:
    """True if the loop can multiply a weight [N, K]; isa: an instruction, else this CPU's."""
    isa = isa or instruction(weight.dtype)
    if isa is None or not readable(weight):
        return False
    N, K = weight.shape
    return N % COLUMNS == 0 and K % (BLOCK if isa == "fma" else 2 * BLOCK) == 0


def in_loops(weight: torch.Tensor) -> bool:
    """True if a loop multiplies a weight: laid out by `by_columns`, or plain and fitting."""
    if weight.dim() == 3:
        return True
    return weight.is_cpu and multiplies(weight.dtype) and plain_fits(weight)


def by_columns(weight: torch.Tensor, isa: str | None = None) -> torch.Tensor:
    """Lay out a weight [N, K] as the loop reads it, [N / COLUMNS, K, COLUMNS].

    In bfloat16 two numbers are paired: for "fma" those of columns c and c + LANES, for "dot" those
    of k and k + 1.
    """
    K, isa = weight.shape[1], isa or instruction(weight.dtype)
    if weight.dtype == torch.float32:
        return weight.view(-1, COLUMNS, K).transpose(1, 2).contiguous()
    if isa == "fma":
        pairs = weight.reshape(-1, 2, LANES, K).permute(0, 3, 2, 1)
    else:
        pairs = weight.reshape(-1, COLUMNS, K // 2, 2).transpose(1, 2)
    return pairs.reshape(-1, K, COLUMNS)


def by_rows(weight: torch.Tensor, isa: str | None = None) -> torch.Tensor:
    """The weight [N, K] that `by_columns` laid out."""
    K, isa = weight.shape[1], isa or instruction(weight.dtype)
    if weight.dtype == torch.float32:
        plain = weight.transpose(1, 2)
    elif isa == "fma":
        plain = weight.view(-1, K, LANES, 2).permute(0, 3, 2, 1)
    else:
        plain = weight.view(-1, K // 2, COLUMNS, 2).transpose(1, 2)
    return plain.reshape(-1, K)


def product(
    x: torch.Tensor,  # [M, K]
    weight: torch.Tensor,  # [N / COLUMNS, K, COLUMNS], or plain [N, K]
    bias: torch.Tensor | None = None,  # [N]
    isa: str | None = None,
) -> torch.Tensor:
    """x W^T + bias, [M, N] in the dtype of x and weight, with sums in float32.

    isa: an instruction, by default this CPU's.
    """
    (M, K), N = x.shape, weight.numel() // x.shape[1]
    y, x = torch.empty(M, N, dtype=x.dtype), x.contiguous()
    if M == 0:
        return y
    wide = None if bias is None else bias.float()
    is_plain = weight.dim() == 2
    transposed = torch.empty(scratch_size(M, K, is_plain), dtype=torch.float32)
    (multiply_plain if is_plain else multiply)(
        parts_for(numbers(weight, M)),
        (M, N, K),
        x.data_ptr(),
        transposed.data_ptr(),
        weight.data_ptr(),
        0 if wide is None else wide.data_ptr(),
        y.data_ptr(),
        LIKE[x.dtype],
        ISA[isa or instruction(x.dtype)],
    )
    return y


def numbers(weight: torch.Tensor, rows: int) -> int:
    """Cost of a product of `rows` rows with a weight, in numbers that a loop computes."""
    return weight.numel() * (1 + rows // COLUMNS)


# what `multiply_by` takes for a quantised weight
QUANTIZED = np.empty(0, np.uint8)


def multiply_by(plain: Any, *args: Any) -> None:
    """Product with a weight of a kind: plain (True), laid out (None), or `QUANTIZED`.

    The type of `plain` decides at compile time, so that the other loops are not compiled. The
    address of a quantised weight is that of its table.
    """
    raise NotImplementedError("loops call it")


@overload(multiply_by, strict=False)
def _choose(plain, *args):
    if isinstance(plain, types.NoneType):
        return lambda plain, *args: multiply(*args)
    if isinstance(plain, types.Array):
        # without `like` and the instruction
        return lambda plain, *args: multiply_parts(*args[:7])
    return lambda plain, *args: multiply_plain(*args)
