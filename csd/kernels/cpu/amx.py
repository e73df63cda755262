"""AMX's tile registers, and the sums in them of a few rows with a block of a weight's columns.

A tile holds 16 rows of 64 bytes. One instruction adds to 16 x 16 sums of float32 the products of 16
rows of x with 32 rows of the weight, both bfloat16, so up to some hundred rows take as long as it
takes to read the weight. Of each 32 products the even and the odd ones are added up apart, each in
the order of k, then both to the sum (Intel's Instruction Set Extensions Reference, TDPBF16PS): a
row's bits do not depend on the rows beside it. Attention's sums are in `amx_rows.py`.
"""

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from csd.kernels.cpu.lanes import FEATURES
from csd.kernels.cpu.vectors import BYTE, FLOAT, INT, LINE, prefetch, rounded

# rows of a tile; rows whose sums are held at once, in two tiles for each half of the columns; and
# numbers of bfloat16 in a row of a tile
TILE, ROWS, DEPTH = 16, 32, 32
# tiles: sums of the upper rows with both halves of the columns, then of the lower ones; the upper
# and the lower rows; both halves of the columns
UPPER, LOWER, X, WEIGHT = (0, 1), (2, 3), (4, 5), (6, 7)

LONG, SHORT = ir.IntType(64), ir.IntType(16)
FLOATS = ir.VectorType(FLOAT, TILE)


@cache
def usable() -> bool:
    """Whether the CPU has AMX for bfloat16 and the system lets this process use it.

    So far all that have it have AVX512-BF16, by which attention rounds weights to pairs.
    """
    has = all(name in FEATURES for name in ("+amx-tile", "+amx-bf16", "+avx512bf16"))
    return has and torch.cpu._init_amx()


def multiply(
    builder: Any,
    rows: Any,  # 1 to ROWS
    steps: Any,  # K / DEPTH
    x: Any,  # address of [rows, K]
    weight: Any,  # of [K / 2, 32, 2]
    start: Any,  # of 32 numbers of float32
    y: Any,  # of [rows, 32], `stride` numbers from a row to the next
    stride: Any,
    ahead: Any,
    step: Any,
) -> None:
    """Code for y = start + x weight; asks for the lines at ahead + i step, `step` bytes a step."""
    sums = cgutils.alloca_once(builder, FLOAT, 4 * TILE * TILE)
    sums.align = LINE
    many = configure(builder, rows)
    for tile in UPPER + LOWER:
        load_tile(builder, tile, builder.add(start, LONG(tile % 2 * LINE)), LONG(0))
    with builder.if_else(many) as (two, one):
        for tiles, branch in ((2, two), (1, one)):
            with branch, cgutils.for_range(builder, steps) as loop:
                _add(builder, tiles, steps, x, weight, loop.index)
                at = builder.add(ahead, builder.mul(loop.index, step))
                with cgutils.for_range_slice(builder, LONG(0), step, LONG(LINE)) as (byte, _):
                    prefetch(builder, _pointer(builder, builder.add(at, byte)))
    for i, tile in enumerate(UPPER + LOWER):
        to = builder.ptrtoint(builder.gep(sums, [LONG(i * TILE * TILE)]), LONG)
        store_tile(builder, tile, to, LONG(LINE))
    release(builder)
    with cgutils.for_range(builder, rows) as loop:
        # rows beyond the first tile's are in the third and the fourth
        below = builder.and_(loop.index, LONG(TILE))
        place = builder.add(loop.index, below)
        for half in range(2):
            at = builder.mul(builder.add(place, LONG(half * TILE)), LONG(TILE))
            found = builder.bitcast(builder.gep(sums, [at]), FLOATS.as_pointer())
            value = rounded(builder, builder.load(found, align=LINE))
            to = builder.add(builder.mul(loop.index, stride), LONG(half * TILE))
            address = builder.add(y, builder.mul(to, LONG(2)))
            pointer = builder.inttoptr(address, value.type.as_pointer())
            builder.store(value, pointer, align=2)


def configure(builder: Any, rows: Any) -> Any:
    """Tells the CPU the tiles' shapes for 1 to ROWS rows; returns whether both row tiles have some.

    Rows and bytes of a row of each tile are bytes 48.. and 16.. of what the CPU reads.
    """
    config = cgutils.alloca_once(builder, BYTE, 64)
    config.align = LINE
    many = builder.icmp_signed(">", rows, LONG(TILE))
    upper = builder.select(many, LONG(TILE), rows)
    # a tile that is not in use has a row as well: none at all is no shape
    lower = builder.select(many, builder.sub(rows, LONG(TILE)), LONG(1))
    upper, lower = builder.trunc(upper, BYTE), builder.trunc(lower, BYTE)
    of = {tile: upper for tile in (*UPPER, X[0])} | {tile: lower for tile in (*LOWER, X[1])}
    for byte in range(64):
        value = BYTE(1 if byte == 0 else 0)
        if 16 <= byte < 32 and byte % 2 == 0:
            value = BYTE(LINE)
        if 48 <= byte < 56:
            value = of.get(byte - 48, BYTE(TILE))
        builder.store(value, builder.gep(config, [INT(byte)]))
    _instruction(builder, "ldtilecfg", config)
    return many


def _add(builder: Any, tiles: int, steps: Any, x: Any, weight: Any, i: Any) -> None:
    row = builder.mul(steps, LONG(2 * DEPTH))
    block = builder.add(weight, builder.mul(i, LONG(2 * DEPTH * 2 * TILE)))
    add_step(builder, tiles, builder.add(x, builder.mul(i, LONG(LINE))), row, block, LONG(2 * LINE))


def add_step(builder: Any, tiles: int, x: Any, row: Any, weight: Any, stride: Any) -> None:
    """Adds to the sums of one or two row tiles their products with DEPTH rows and both halves.

    x, weight: addresses, and the bytes from a row to the next; 16 rows of pairs of the weight.
    """
    for half, tile in enumerate(WEIGHT):
        load_tile(builder, tile, builder.add(weight, LONG(half * LINE)), stride)
    for group, sums in enumerate((UPPER, LOWER)[:tiles]):
        load_tile(builder, X[group], builder.add(x, builder.mul(row, LONG(group * TILE))), row)
        for total, half in zip(sums, WEIGHT, strict=True):
            _instruction(builder, "tdpbf16ps", BYTE(total), BYTE(X[group]), BYTE(half))


def load_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _instruction(builder, "tileloadd64", BYTE(tile), _pointer(builder, address), stride)


def store_tile(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _instruction(builder, "tilestored64", BYTE(tile), _pointer(builder, address), stride)


def clear_tile(builder: Any, tile: int) -> None:
    _instruction(builder, "tilezero", BYTE(tile))


def release(builder: Any) -> None:
    """Ends the use of tiles, so that the system need not save them with the thread's registers."""
    _instruction(builder, "tilerelease")


def _instruction(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, BYTE.as_pointer())
