"""x W^T + b for a quantised W: the rows of x are rounded once, each matrix has a loop of its type.

A fused product's parts (queries, keys, values) may have different types. So a weight is a table of
parts, each with the address of the compiled loop of its type, and one loop calls these.
"""

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.layers.quantized.cpu.round_rows import WORDS, places, round_rows, workspace_size
from csd.kernels.layers.quantized.cpu.tile import ROWS, instructions, tile_of
from csd.kernels.layers.quantized.formats import BLOCK, FORMATS, PAIR
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import memory
from csd.kernels.numba.threads import by_threads, parts_for, share

# bytes from the numbers that are multiplied to those that are prefetched
AHEAD = 4096
F32, I64 = np.empty(0, np.float32), np.empty(0, np.int64)
# numbers of x that are rounded in several threads: fewer take less time than a thread's start
LEAST = 1 << 15
# numbers of a part in a weight's table
ENTRY = 4
# what copies of the functions below call: a type's intrinsic, and the loop of all tiles
tile: Any = None
tiles: Any = None


def _multiply_tiles(part, parts, M, N, K, workspace, weight, tile_bytes, bias, y, stride):
    """A part's share of y [M, N] = x W^T + bias; `tile` is the intrinsic of W's type."""
    blocks, each = K // BLOCK, rows_of_tile(M)
    numbers, words, seconds, second_words = places(M, K)
    begin, end = share(-(-N // PAIR), part, parts)
    second_rows = memory(workspace, M + 1, I64)
    # the last pair of tiles may have fewer columns than it computes
    edge, start = np.zeros(ROWS * PAIR, np.float32), np.zeros(PAIR, np.float32)
    for c in range(begin, end):
        columns = min(PAIR, N - c * PAIR)
        block = weight + c * 2 * tile_bytes
        own = start.ctypes.data
        if bias and columns == PAIR:
            own = bias + c * PAIR * 4
        elif bias:
            start[:columns] = memory(bias + c * PAIR * 4, columns, F32)
        out = y + c * PAIR * 4
        for first in range(0, M, each):
            rows = min(each, M - first)
            # prefetch the lines that follow, or by the first of several tiles of rows the next pair
            far = AHEAD if each >= M else 2 * tile_bytes
            ahead = block + (far if first == 0 else 0)
            x = workspace + numbers + first * K
            s = workspace + words + first * blocks * WORDS * 4
            target, step = out + first * stride * 4, stride
            if columns != PAIR:
                target, step = edge.ctypes.data, PAIR
            tile(rows, K, x, s, block, tile_bytes, own, 0, target, step, ahead)
            if columns != PAIR:
                for r in range(rows):
                    row = memory(out + (first + r) * stride * 4, columns, F32)
                    row[:] = edge[r * PAIR : r * PAIR + columns]
        # second digits are added to rows of y that lie apart
        for first in range(0, second_rows[0], each):
            rows = min(each, second_rows[0] - first)
            for r in range(rows):
                row = memory(out + second_rows[first + r + 1] * stride * 4, columns, F32)
                edge[r * PAIR : r * PAIR + columns] = row
            x = workspace + seconds + first * K
            s = workspace + second_words + first * blocks * WORDS * 4
            at = edge.ctypes.data
            tile(rows, K, x, s, block, tile_bytes, at, PAIR, at, PAIR, block)
            for r in range(rows):
                row = memory(out + second_rows[first + r + 1] * stride * 4, columns, F32)
                row[:] = edge[r * PAIR : r * PAIR + columns]


@loop
def rows_of_tile(M):
    """Rows of each tile of M rows."""
    return -(-M // -(-M // ROWS)) if M else 1


@cache
def address_of(name: str, instruction: str) -> int:
    """Address of the loop of all tiles for a format and an instruction, compiled on first use."""
    # links what loops of several threads call
    parts_for(0)
    label = f"{name}_{instruction}"
    tiles = by_threads(
        copied(_multiply_tiles, f"_tiles_{label}", tile=tile_of(FORMATS[name], instruction))
    )
    call = loop(copied(_multiply, f"_multiply_{label}", tiles=tiles.run))
    kinds = (types.intp,) * ARGUMENTS
    call.compile(kinds)
    code = call.overloads[kinds]
    return code.library.get_pointer_to_function(code.fndesc.llvm_func_name)


def _multiply(threads, M, N, K, workspace, weight, tile_bytes, bias, y, stride):
    tiles(threads, M, N, K, workspace, weight, tile_bytes, bias, y, stride)


ARGUMENTS = _multiply.__code__.co_argcount


def copied(function: Any, name: str, **names: Any) -> Any:
    """A copy by another name, by which numba's cache identifies it, with further globals."""
    made = FunctionType(function.__code__, function.__globals__ | names, name)
    made.__module__, made.__qualname__ = function.__module__, name
    return made


@intrinsic
def _call(typing_context, address, arguments):
    """Call the compiled loop at an address."""
    kinds = tuple(types.intp for _ in arguments)

    def generate(context, builder, signature, args):
        kind = context.call_conv.get_function_type(types.none, kinds)
        function = builder.inttoptr(args[0], kind.as_pointer())
        values = cgutils.unpack_tuple(builder, args[1], len(kinds))
        values = [
            context.cast(builder, v, k, types.intp)
            for v, k in zip(values, signature.args[1].types, strict=True)
        ]
        status, _ = context.call_conv.call_function(builder, function, types.none, kinds, values)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_user_exc(builder, RuntimeError, ("a product failed",))
        return context.get_dummy_value()

    return types.none(address, arguments), generate


@loop
def multiply_parts(threads, shape, x, workspace, table, bias, y):
    """y [M, N] = x W^T + bias, float32; all tensors are addresses.

    table: of the weight, as `table_of` makes it. workspace: `workspace_size` bytes.
    """
    M, N, K = shape
    count = memory(table, 1, I64)[0]
    entries = memory(table, 1 + ENTRY * count, I64)
    round_rows(threads if M * K >= LEAST else 1, M, K, rows_of_tile(M), x, workspace)
    first = 0
    for i in range(count):
        e = 1 + ENTRY * i
        rows = entries[e + 1]
        at = bias + first * 4 if bias else 0
        _call(
            entries[e],
            (threads, M, rows, K, workspace, entries[e + 2], entries[e + 3], at, y + first * 4, N),
        )
        first += rows


def table_of(weight: Any, instruction: str | None = None) -> np.ndarray:
    """Table of a quantised weight: its number of parts; address of loop, rows, address, bytes."""
    name, K = instruction or instructions()[0], weight.shape[1]
    table = [len(weight.parts)]
    for part in weight.parts:
        format = FORMATS[part.format]
        table += [
            address_of(part.format, name),
            part.rows,
            part.data.data_ptr(),
            format.tile_size(K),
        ]
    return np.array(table, np.int64)


def product(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, instruction: str | None = None
) -> torch.Tensor:
    """x [M, K] float32 times a quantised weight [N, K], plus bias [N] float32: [M, N] float32."""
    x = x.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    y = torch.empty(M, N)
    if M == 0:
        return y
    table = table_of(weight, instruction)
    workspace = torch.empty(workspace_size(M, K), dtype=torch.uint8)
    multiply_parts(
        parts_for(N * K * (1 + M // 8)),
        (M, N, K),
        x.data_ptr(),
        workspace.data_ptr(),
        table.ctypes.data,
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    return y
