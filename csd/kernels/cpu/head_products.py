"""A head's rows times a page of keys or values, in the CPU's vectors."""

from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.lanes import BLOCK, WIDTH, add_eight_rows, add_four_rows, turn, widen
from csd.kernels.cpu.numbers import read

# keys of a page
PAGE = 64


@loop
def score_keys(keys, h, low, high, at, query, score, tile):
    """score[low:high, at : at + len(keys)] = query times keys; what follows may be overwritten."""
    count, K, D = keys.shape
    whole = D // BLOCK * BLOCK
    for j in range(0, count, BLOCK):
        for d in range(0, whole, BLOCK):
            turn(keys, (j * K + h) * D + d, K * D, count - 1 - j, tile, d * PAGE + j, PAGE)
    for j in range(count):
        for d in range(whole, D):
            tile[d * PAGE + j] = read(keys[j, h, d])
    for i in range(low, high):
        score[i, at : at + -(-count // BLOCK) * BLOCK] = 0
    _add_product(query, low, high, 0, D, tile, PAGE, count, score, at)


@loop
def add_values(values, h, low, high, at, weight, sums, tile):
    """sums[low:high] += weight[low:high, at : at + len(values)] times values, key after key."""
    count, K, D = values.shape
    wide, whole = sums.shape[1], D // BLOCK * BLOCK
    for j in range(count):
        for d in range(0, whole, BLOCK):
            widen(values, (j * K + h) * D + d, tile, j * wide + d)
        for d in range(whole, D):
            tile[j * wide + d] = read(values[j, h, d])
    _add_product(weight, low, high, at, count, tile, wide, D, sums, 0)


@loop
def _add_product(x, low, high, x_at, terms, tile, wide, columns, y, y_at):
    """y[low:high, y_at:] += x[low:high, x_at:] tile, a term after another, each rounded once.

    x: `terms` numbers a row; tile: [terms, wide], of which `columns` are taken. The sums of four
    rows stay in registers, or in a last block of columns those of eight.
    """
    # three blocks one by one take less time than four together
    whole = (columns + BLOCK - 1) // WIDTH * WIDTH
    for i in range(low, high, 4):
        for at in range(0, whole, WIDTH):
            add_four_rows(x, i, high, x_at, terms, tile, wide, at, y, y_at + at)
    for at in range(whole, columns, BLOCK):
        for i in range(low, high, 8):
            add_eight_rows(x, i, high, x_at, terms, tile, wide, at, y, y_at + at)
