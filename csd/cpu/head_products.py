"""Products of a head's rows with a page of keys or values, in vector registers.

"fma" multiplies numbers as float32, "dot" pairs of bfloat16 (`tiles.ISA`). A pair holds two
adjacent numbers of a key or a query, or the values or weights of two keys.
"""

from typing import Any

from numba.extending import overload

from csd.cpu.attention_workspace import PAGE
from csd.cpu.blocks import pair, round_pairs, transpose, widen
from csd.cpu.compiled import loop
from csd.cpu.lanes import BLOCK, WIDTH
from csd.cpu.row_sums import add_eight_rows, add_four_rows
from csd.cpu.tensor_access import read
from csd.cpu.tiles import is_dot


@loop
def score_keys(keys, h, low, high, offset, query, score, work, isa):
    """score[low:high, offset : offset + len(keys)] = query[low:high] times head h of keys.

    Up to BLOCK - 1 later columns may be overwritten. With "dot" keys and query hold pairs in the
    place of float32. work: memory of the products, from `workspace`.
    """
    tile, (count, K, D) = work[0], keys.shape
    whole = D // BLOCK * BLOCK
    for j in range(0, count, BLOCK):
        for d in range(0, whole, BLOCK):
            transpose(keys, (j * K + h) * D + d, K * D, count - 1 - j, tile, d * PAGE + j, PAGE)
    for j in range(count):
        for d in range(whole, D):
            tile[d * PAGE + j] = read(keys[j, h, d])
    for i in range(low, high):
        score[i, offset : offset + -(-count // BLOCK) * BLOCK] = 0
    _add_product(query, low, high, 0, D, tile, PAGE, count, score, offset, isa)


def add_values(
    values: Any,
    h: int,
    low: int,
    high: int,
    offset: int,
    weight: Any,
    sums: Any,
    work: Any,
    isa: Any,
) -> None:
    """sums[low:high] += weight[low:high, offset : offset + len(values)] times head h of values.

    Products are added key by key. With "dot" weights are rounded to bfloat16, into pairs. The first
    key of a pair is its odd one, whose product is added first, so sums do not depend on where pairs
    begin.
    """


@overload(add_values)
def _add_values(values, h, low, high, offset, weight, sums, work, isa):
    add = _add_pairs if is_dot(isa) else _add_numbers
    return lambda values, h, low, high, offset, weight, sums, work, isa: add(
        values, h, low, high, offset, weight, sums, work, isa
    )


@loop
def _add_numbers(values, h, low, high, offset, weight, sums, work, isa):
    tile, (count, K, D) = work[0], values.shape
    wide, whole = sums.shape[1], D // BLOCK * BLOCK
    for j in range(count):
        for d in range(0, whole, BLOCK):
            widen(values, (j * K + h) * D + d, tile, j * wide + d)
        for d in range(whole, D):
            tile[j * wide + d] = read(values[j, h, d])
    _add_product(weight, low, high, offset, count, tile, wide, D, sums, 0, isa)


@loop
def _add_pairs(values, h, low, high, offset, weight, sums, work, isa):
    tile, pairs = work
    count, D = values.shape[0], values.shape[2]
    wide, columns = sums.shape[1], weight.shape[1]
    _pair_values(values, h, tile, wide)
    for i in range(low, high):
        for j in range(0, count, 2 * BLOCK):
            round_pairs(weight, i * columns + offset + j, count - j, pairs, (i * PAGE + j) // 2)
    _add_product(pairs, low, high, 0, (count + 1) // 2, tile, wide, D, sums, 0, isa)


@loop
def _pair_values(values, h, tile, wide):
    """tile[j / 2, d] = pair of the values of keys j and j + 1, for even j; zero after the last."""
    count, K, D = values.shape
    for j in range(0, count, 2):
        stride = K * D if j + 1 < count else 0
        for d in range(0, D, BLOCK):
            pair(values, (j * K + h) * D + d, stride, tile, j // 2 * wide + d)


@loop
def _add_product(x, low, high, x_offset, terms, tile, wide, columns, y, y_offset, isa):
    """y[low:high, y_offset:] += x[low:high, x_offset:] tile, term by term, each rounded once.

    x: `terms` numbers per row; tile: [terms, wide], of which the first `columns` columns are used.
    The sums of four rows stay in registers, or those of eight rows for the last blocks of columns.
    """
    # three blocks of eight rows take less time than four of four
    whole = (columns + BLOCK - 1) // WIDTH * WIDTH
    for i in range(low, high, 4):
        for offset in range(0, whole, WIDTH):
            add_four_rows(
                x, i, high, x_offset, terms, tile, wide, offset, y, y_offset + offset, isa
            )
    blocks = (columns - whole + BLOCK - 1) // BLOCK
    if blocks > 0:
        for i in range(low, high, 8):
            add_eight_rows(
                blocks, x, i, high, x_offset, terms, tile, wide, whole, y, y_offset + whole, isa
            )
