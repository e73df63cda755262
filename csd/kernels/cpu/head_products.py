"""A head's rows times a page of keys or values, in the CPU's vectors."""

from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.lanes import BLOCK, WIDTH, add_multiple, block, lanes, put, turn, widen
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
    rows stay in registers, or in a last block of columns those of eight; where fewer are left, the
    last one is done more than once.
    """
    stride, end = y.shape[1], x_at + terms
    # three blocks one by one take less time than four together
    whole = (columns + BLOCK - 1) // WIDTH * WIDTH
    for i in range(low, high, 4):
        j, k, l = min(i + 1, high - 1), min(i + 2, high - 1), min(i + 3, high - 1)
        xi, xj, xk, xl = x[i, x_at:end], x[j, x_at:end], x[k, x_at:end], x[l, x_at:end]
        for at in range(0, whole, WIDTH):
            to = y_at + at
            yi, yj = lanes(y, i * stride + to), lanes(y, j * stride + to)
            yk, yl = lanes(y, k * stride + to), lanes(y, l * stride + to)
            for t in range(terms):
                row = lanes(tile, t * wide + at)
                yi, yj = add_multiple(yi, xi[t], row), add_multiple(yj, xj[t], row)
                yk, yl = add_multiple(yk, xk[t], row), add_multiple(yl, xl[t], row)
            put(yi, y, i * stride + to)
            put(yj, y, j * stride + to)
            put(yk, y, k * stride + to)
            put(yl, y, l * stride + to)
    for at in range(whole, columns, BLOCK):
        for i in range(low, high, 8):
            _eight_rows(x, i, high - 1, x_at, terms, tile, wide, at, y, y_at + at)


@loop
def _eight_rows(x, i, last, x_at, terms, tile, wide, at, y, to):
    """A block of columns of `_add_product` for rows i to i + 7, or to the last one."""
    stride, end = y.shape[1], x_at + terms
    j, k, l, m = min(i + 1, last), min(i + 2, last), min(i + 3, last), min(i + 4, last)
    n, o, p = min(i + 5, last), min(i + 6, last), min(i + 7, last)
    xi, xj, xk, xl = x[i, x_at:end], x[j, x_at:end], x[k, x_at:end], x[l, x_at:end]
    xm, xn, xo, xp = x[m, x_at:end], x[n, x_at:end], x[o, x_at:end], x[p, x_at:end]
    yi, yj = block(y, i * stride + to), block(y, j * stride + to)
    yk, yl = block(y, k * stride + to), block(y, l * stride + to)
    ym, yn = block(y, m * stride + to), block(y, n * stride + to)
    yo, yp = block(y, o * stride + to), block(y, p * stride + to)
    for t in range(terms):
        row = block(tile, t * wide + at)
        yi, yj = add_multiple(yi, xi[t], row), add_multiple(yj, xj[t], row)
        yk, yl = add_multiple(yk, xk[t], row), add_multiple(yl, xl[t], row)
        ym, yn = add_multiple(ym, xm[t], row), add_multiple(yn, xn[t], row)
        yo, yp = add_multiple(yo, xo[t], row), add_multiple(yp, xp[t], row)
    put(yi, y, i * stride + to)
    put(yj, y, j * stride + to)
    put(yk, y, k * stride + to)
    put(yl, y, l * stride + to)
    put(ym, y, m * stride + to)
    put(yn, y, n * stride + to)
    put(yo, y, o * stride + to)
    put(yp, y, p * stride + to)
