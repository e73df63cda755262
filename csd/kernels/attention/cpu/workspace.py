"""A thread's workspace for attention: parts of one allocation, each of whole cache lines.

A part does not own its memory. Where an array that owns its memory is passed on, numba counts
references by atomic instructions. An array that numba allocates may also begin in the middle of a
cache line, so that each vector of a line's size lies in two of them.
"""

from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import WIDTH
from csd.kernels.numba.simd import LINE
from csd.kernels.numba.tensors import memory

# keys per page
PAGE = 64
# number of parts
PARTS = 7


@loop
def workspace_bytes(many, words, columns, wide, like):
    """Number of bytes that `workspace` needs."""
    numbers = many * (words + columns + wide + PAGE // 2 + 1) + PAGE * wide + WIDTH
    return numbers * like.itemsize + (PARTS + 1) * LINE


@loop
def workspace(address, many, words, columns, wide, like):
    """Arrays for `many` rows in the memory at `address`, of the dtype of `like`.

    Returns query [many, words], score [many, columns], sums [many, wide] of zeros, total [many], a
    softmax's sums [WIDTH], and the memory of the products: a tile [PAGE * wide] of keys or values
    and the rows' weights in pairs [many, PAGE / 2].
    """
    size = like.itemsize
    offset = address + -address % LINE
    query = memory(offset, (many, words), like)
    offset += whole_lines(many * words * size)
    score = memory(offset, (many, columns), like)
    offset += whole_lines(many * columns * size)
    sums = memory(offset, (many, wide), like)
    offset += whole_lines(many * wide * size)
    pairs = memory(offset, (many, PAGE // 2), like)
    offset += whole_lines(many * PAGE // 2 * size)
    total = memory(offset, many, like)
    offset += whole_lines(many * size)
    lanes = memory(offset, WIDTH, like)
    offset += whole_lines(WIDTH * size)
    tile = memory(offset, PAGE * wide, like)
    # products run over whole vectors: uninitialized numbers in them may be denormal, each of which
    # takes a hundred times as long
    tile[:] = 0
    sums[:] = 0
    return query, score, sums, total, lanes, (tile, pairs)


@loop
def whole_lines(size):
    """`size` in bytes, rounded up to whole cache lines."""
    return -(-size // LINE) * LINE
