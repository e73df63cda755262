"""Products of a head's rows with pages of keys or values; sums are kept in the CPU's registers.

`score_keys` and `add_values` multiply one page, `score_pages` and `add_pages` a table's pages, each
of which is prefetched during the one before. All heads of a token are adjacent in memory, so a
page's heads are processed one after another.

"fma" multiplies numbers as float32, "dot" pairs of bfloat16 (`tiles.ISA`). A pair holds two
adjacent numbers of a key or a query, or the values or weights of two keys.

A thread's workspace is parts of one allocation, each of whole cache lines. A part does not own its
memory: where an array that owns its memory is passed on, numba counts references by atomic
instructions. An array that numba allocates may also begin in the middle of a cache line, so that
each vector of a line's size lies in two of them.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import (
    BLOCK,
    FLOATS,
    WIDTH,
    fetch_early,
    load,
    pair,
    pointer,
    round_pairs,
    store,
    transpose,
    widen,
)
from csd.kernels.numba.simd import LINE, add_product, for_rows, splat
from csd.kernels.numba.tensors import memory, read
from csd.kernels.numba.tiles import is_dot
from csd.state.kv_cache import PAGE

# number of parts
PARTS = 7


@loop
def workspace_bytes(many, words, columns, wide, like):
    """Number of bytes that `workspace` needs."""
    numbers = many * (words + columns + wide + PAGE // 2 + 1) + PAGE * wide + BLOCK
    return numbers * like.itemsize + (PARTS + 1) * LINE


@loop
def workspace(address, many, words, columns, wide, like):
    """Arrays for `many` rows in the memory at `address`, of the dtype of `like`.

    Returns query [many, words], score [many, columns], sums [many, wide] of zeros, total [many], a
    softmax's sums [BLOCK], and the memory of the products: a tile [PAGE * wide] of keys or values
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
    lanes = memory(offset, BLOCK, like)
    offset += whole_lines(BLOCK * size)
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


# blocks of WIDTH columns
BLOCKS = WIDTH // BLOCK
BYTES = np.empty(0, np.uint8)


@intrinsic
def add_four_rows(typing_context, x, i, end, x_offset, terms, tile, wide, offset, y, y_offset, isa):
    """y[r, y_offset + j] += sum over t of x[r, x_offset + t] tile[t wide + offset + j], in order.

    For r from i to i + 3 and j < WIDTH; rows from `end` on repeat the last one. With "dot" of
    `tiles.ISA` x and tile hold pairs of bfloat16.
    """

    def generate(context, builder, signature, args):
        _add_rows(context, builder, (x, tile, y, isa), args, 4, BLOCKS)
        return context.get_dummy_value()

    index = types.intp
    return types.none(x, *[index] * 4, tile, index, index, y, index, isa), generate


@intrinsic
def add_eight_rows(
    typing_context, blocks, x, i, end, x_offset, terms, tile, wide, offset, y, y_offset, isa
):
    """`add_four_rows` for eight rows and `blocks` times BLOCK columns, fewer than WIDTH."""

    def generate(context, builder, signature, args):
        def some_blocks(count):
            _add_rows(context, builder, (x, tile, y, isa), args[1:], 8, count)

        for_rows(builder, args[0], BLOCKS - 1, some_blocks)
        return context.get_dummy_value()

    index = types.intp
    return types.none(index, x, *[index] * 4, tile, index, index, y, index, isa), generate


def _add_rows(
    context: Any, builder: Any, kinds: tuple[types.Array, ...], args: Any, rows: int, blocks: int
) -> None:
    """Emit the code for `rows` rows and `blocks` blocks of columns."""
    x, tile, y, isa = kinds
    x_, first, end, x_offset, terms, tile_, wide, offset, y_, y_offset, _ = args
    vector, pairs = ir.VectorType(FLOATS[y.dtype], BLOCK), is_dot(isa)
    columns = [end.type(block * BLOCK) for block in range(blocks)]

    def width(kind: types.Array, array: Any) -> Any:
        shape = context.make_array(kind)(context, builder, array).shape
        return cgutils.unpack_tuple(builder, shape)[1]

    last = builder.sub(end, end.type(1))
    each = [builder.add(first, first.type(r)) for r in range(rows)]
    each = [builder.select(builder.icmp_signed("<", r, last), r, last) for r in each]
    numbers = [builder.add(builder.mul(r, width(x, x_)), x_offset) for r in each]
    starts = [builder.add(builder.mul(r, width(y, y_)), y_offset) for r in each]
    to = [[builder.add(start, column) for column in columns] for start in starts]
    sums = [
        [
            cgutils.alloca_once_value(builder, load(context, builder, y, y_, element, vector))
            for element in row
        ]
        for row in to
    ]
    with cgutils.for_range(builder, terms) as loop:
        start = builder.add(builder.mul(loop.index, wide), offset)
        parts = [
            load(context, builder, tile, tile_, builder.add(start, column), vector)
            for column in columns
        ]
        for row, element in zip(sums, numbers, strict=True):
            element = builder.add(element, loop.index)
            number = builder.load(pointer(context, builder, x, x_, element, vector.element))
            number = splat(builder, number, BLOCK)
            for total, part in zip(row, parts, strict=True):
                added = add_product(builder, builder.load(total), number, part, pairs)
                builder.store(added, total)
    for row, places in zip(sums, to, strict=True):
        for total, element in zip(row, places, strict=True):
            store(context, builder, y, y_, element, builder.load(total))


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
    add_terms(query, low, high, 0, D, tile, PAGE, count, score, offset, isa)


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
    add_terms(weight, low, high, offset, count, tile, wide, D, sums, 0, isa)


@loop
def _add_pairs(values, h, low, high, offset, weight, sums, work, isa):
    tile, pairs = work
    count, K, D = values.shape
    wide, columns = sums.shape[1], weight.shape[1]
    # tile[j / 2, d]: the values of keys j and j + 1, zero after the last key
    for j in range(0, count, 2):
        stride = K * D if j + 1 < count else 0
        for d in range(0, D, BLOCK):
            pair(values, (j * K + h) * D + d, stride, tile, j // 2 * wide + d)
    for i in range(low, high):
        for j in range(0, count, 2 * BLOCK):
            round_pairs(weight, i * columns + offset + j, count - j, pairs, (i * PAGE + j) // 2)
    add_terms(pairs, low, high, 0, (count + 1) // 2, tile, wide, D, sums, 0, isa)


@loop
def add_terms(x, low, high, x_offset, terms, tile, wide, columns, y, y_offset, isa):
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


@loop
def of_head(h, heads, rows):
    """Begin and end of head h's rows; rows: begin and end in the first head, and rows per head."""
    before = (h - heads[0]) * rows[2]
    return before + rows[0], before + rows[1]


@loop
def page_of(pages, table, length, offset):
    """Rows of a page from token `offset` on, up to token `length`; empty if offset >= length."""
    if offset >= length:
        return pages[0, :0]
    within = offset % PAGE
    return pages[table[offset // PAGE], within : min(PAGE, length - offset + within)]


@loop
def _fetch(lines, h):
    """Prefetch head h's keys or values; lines: a page's bytes [tokens, K, size]."""
    count, K, size = lines.shape
    for t in range(count):
        for byte in range(0, size, LINE):
            fetch_early(lines, (t * K + h) * size + byte)


@loop
def score_pages(keys, tokens, then, heads, rows, offset, query, score, work, isa):
    """Run `score_keys` on a range of tokens: a table of pages, the first token and the end.

    keys: pages as numbers and as bytes; then: bytes of the page that is read after these, to
    prefetch; heads: begin and end; rows: as `of_head` takes them; offset: column of token 0.
    """
    table, done, last = tokens
    while done < last:
        page, follows = page_of(keys[0], table, last, done), (done // PAGE + 1) * PAGE
        lines = page_of(keys[1], table, last, follows) if follows < last else then
        for h in range(heads[0], heads[1]):
            _fetch(lines, h)
            low, high = of_head(h, heads, rows)
            score_keys(page, h, low, high, offset + done, query, score, work, isa)
        done = follows


@loop
def add_pages(values, tokens, then, heads, rows, offset, weight, sums, work, isa):
    """Run `add_values` on a range of tokens; arguments as for `score_pages`."""
    table, done, last = tokens
    while done < last:
        page, follows = page_of(values[0], table, last, done), (done // PAGE + 1) * PAGE
        lines = page_of(values[1], table, last, follows) if follows < last else then
        for h in range(heads[0], heads[1]):
            _fetch(lines, h)
            low, high = of_head(h, heads, rows)
            add_values(page, h, low, high, offset + done, weight, sums, work, isa)
        done = follows
