"""Which of a slot's keys, committed ones and nodes, are added to the sums of its rows at once.

A key must be added in the same way whether it is committed or a node, or a row's bits would depend
on what was drafted. By "fma" and "dot" keys are added one after another, and hidden ones add zero.
By "amx" 32 are added at once, which nodes cannot be: which nodes a row sees, and so which keys are
neighbours, differs from row to row. So a row takes only as many blocks of committed keys by AMX as
no tree reaches into, those of the first T = 32 floor(max(n - 17, 0) / 32) of its n keys, and the
other 1 to 48 one after another. (`csd/kernels/exact_attention` has blocks of 64.)
"""

from typing import Any

from numba import types
from numba.extending import overload

from csd.kernels.cpu.amx import DEPTH
from csd.kernels.cpu.compiled import loop
from csd.kernels.cpu.page_products import add_pages, of_head, page_of
from csd.kernels.cpu.tiles import BY
from csd.state.pool import MAX_DEPTH

FMA = BY["fma"]


def add_blocks(
    values: Any, tokens: Any, heads: Any, rows: Any, at: int, seen: Any, weight: Any, sums: Any,
    work: Any, by: Any,
) -> int:  # fmt: skip
    """By "amx" adds the values of whole blocks of a slot's keys, and hides them from the rest.

    seen: [many], how many of the slot's keys a row sees. The others are `add_pages`'s. Returns the
    first key that is left to any row: 0 by other instructions.
    """


@overload(add_blocks)
def _add_blocks_by(values, tokens, heads, rows, at, seen, weight, sums, work, by):
    if by.dtype != types.uint8:
        return lambda values, tokens, heads, rows, at, seen, weight, sums, work, by: 0
    return lambda values, tokens, heads, rows, at, seen, weight, sums, work, by: _add_whole_blocks(
        values, tokens, heads, rows, at, seen, weight, sums, work, by
    )


def in_order(by: Any) -> Any:
    """By which instruction keys are added one after another."""


@overload(in_order)
def _in_order(by):
    return (lambda by: FMA) if by.dtype == types.uint8 else (lambda by: by)


@loop
def _add_whole_blocks(values, tokens, heads, rows, at, seen, weight, sums, work, by):
    table, begin, length = tokens
    ends, first, last = work[2], _whole_blocks(length + 1, length), 0
    for h in range(heads[0], heads[1]):
        low, high = of_head(h, heads, rows)
        for i in range(low, high):
            blocks = _whole_blocks(seen[i], length)
            ends[i], last = at + blocks, max(last, blocks)
    then = page_of(values[1], table, length, first)
    add_pages(values, (table, begin, last), then, heads, rows, at, weight, sums, work, by)
    # a row deep in its tree may have taken a block more than the root
    for h in range(heads[0], heads[1]):
        low, high = of_head(h, heads, rows)
        for i in range(low, high):
            weight[i, at + first : ends[i]] = 0
    return first


@loop
def _whole_blocks(seen, length):
    """How many keys a row takes by AMX that sees so many of a slot's, `length` of them committed.

    A tree may be deeper than csd's (`csd_tree`): then no more than are committed.
    """
    return min(max(seen - 1 - MAX_DEPTH, 0), length) // DEPTH * DEPTH
