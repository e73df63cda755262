"""A thread's workspace for attention: parts of one piece of memory, each of whole cache lines.

A part owns nothing. Where an array that owns its memory is handed on, numba counts its users by
atomic instructions; and one that numba allocates may begin in the middle of a line, so that each
vector of a line's size lies in two of them.
"""

from csd.cpu.compiled import loop
from csd.cpu.lanes import WIDTH
from csd.cpu.numbers import memory
from csd.cpu.vectors import LINE

# keys of a page
PAGE = 64
# how many parts there are
PARTS = 7


@loop
def workspace_bytes(many, words, columns, wide, like):
    """Bytes that `workspace` needs."""
    numbers = many * (words + columns + wide + PAGE // 2 + 1) + PAGE * wide + WIDTH
    return numbers * like.itemsize + (PARTS + 1) * LINE


@loop
def workspace(address, many, words, columns, wide, like):
    """A workspace for `many` rows: query [many, words], score [many, columns], sums [many, wide] of
    zeros, total [many], a softmax's sums [WIDTH], and the memory of the products.

    The latter is a tile of PAGE keys or values, and the rows' weights in pairs [many, PAGE / 2].
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
    # products run over whole lanes: numbers that nobody reads may be denormal, and each of those
    # takes a hundred times as long
    tile[:] = 0
    sums[:] = 0
    return query, score, sums, total, lanes, (tile, pairs)


@loop
def whole_lines(size):
    return -(-size // LINE) * LINE
