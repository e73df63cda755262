"""Steps of the packed attention and of its gradients in a tile of rows and a block of keys."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.attention.triton.tile import tile_heads

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


class PackedOperands(NamedTuple):
    """Operands of the packed attention, and of its gradients."""

    q: torch.Tensor  # [R, H, D]
    k: torch.Tensor  # [R, K, D]
    v: torch.Tensor  # [R, K, DV]
    grad: torch.Tensor | None = None  # [R, H, DV]
    lse: torch.Tensor | None = None  # [R, H] float32
    delta: torch.Tensor | None = None  # [R, H] float32


class TileRows(NamedTuple):
    """Rows of a tile, packed with the query heads of one key-value head."""

    row: tl.tensor  # [BLOCK_M]
    head: tl.tensor  # [BLOCK_M]
    index: tl.tensor  # [BLOCK_M] int64, of the head among all rows' heads
    mask: tl.tensor  # [BLOCK_M]
    since: tl.tensor  # [BLOCK_M], first position that it attends to; unused without a window
    q: tl.tensor  # [BLOCK_M, BLOCK_D]


class BlockKeys(NamedTuple):
    """Keys of a block, and the values of one head."""

    key: tl.tensor  # [BLOCK_N]
    index: tl.tensor  # [BLOCK_N] int64, of the head among all keys' heads
    mask: tl.tensor  # [BLOCK_N]
    end: tl.tensor  # [BLOCK_N]
    position: tl.tensor  # [BLOCK_N]; unused without first positions in the work list
    k: tl.tensor  # [BLOCK_N, BLOCK_D]
    v: tl.tensor  # [BLOCK_N, BLOCK_V]


@triton.jit
def packed_tile_rows(
    operands, work, tile, kv, R, ROWS: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr
):
    """`TileRows` of a tile of ROWS rows."""
    EACH: tl.constexpr = C.H // C.K
    # [BLOCK_M]
    offs_m = tl.arange(0, C.BLOCK_M)
    row = tile * ROWS + offs_m // EACH
    head = kv * EACH + offs_m % EACH
    mask = (offs_m < ROWS * EACH) & (row < R)
    index = row.to(tl.int64) * C.H + head
    q = tile_heads(operands.q, index * C.D, mask, C.D, C.BLOCK_D, DTYPE)
    since = row
    if work.first is not None:
        since = tl.load(work.first + row, mask=mask, other=0)
    return TileRows(row, head, index, mask, since, q)


@triton.jit
def tile_gradients(operands, rows, DTYPE: tl.constexpr, C: tl.constexpr):
    """[BLOCK_M, BLOCK_V]: gradients of rows; [BLOCK_M]: their lse in base 2, and delta."""
    index, mask = rows.index, rows.mask
    grad = tile_heads(operands.grad, index * C.DV, mask, C.DV, C.BLOCK_V, DTYPE)
    lse = tl.load(operands.lse + index, mask=mask, other=0.0) * LOG2E
    return grad, lse, tl.load(operands.delta + index, mask=mask, other=0.0)


@triton.jit
def packed_block_keys(operands, layout, work, block, kv, R, DTYPE: tl.constexpr, C: tl.constexpr):
    """`BlockKeys` of a block of BLOCK_N keys."""
    # [BLOCK_N]
    key = block * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    mask = key < R
    end = tl.load(layout.end + key, mask=mask, other=0)
    position = end
    if work.first is not None:
        position = tl.load(layout.position + key, mask=mask, other=0)
    # [BLOCK_N, ..]
    index = key.to(tl.int64) * C.K + kv
    k = tile_heads(operands.k, index * C.D, mask, C.D, C.BLOCK_D, DTYPE)
    v = tile_heads(operands.v, index * C.DV, mask, C.DV, C.BLOCK_V, DTYPE)
    return BlockKeys(key, index, mask, end, position, k, v)


@triton.jit
def sees_keys(work, rows, keys, AXIS: tl.constexpr):
    """True where a row attends to a key, whose axis is AXIS; the other is the rows'."""
    row, key = tl.expand_dims(rows.row, AXIS), tl.expand_dims(keys.key, 1 - AXIS)
    seen = (key <= row) & (row < tl.expand_dims(keys.end, 1 - AXIS))
    if work.first is not None:
        position = tl.expand_dims(keys.position, 1 - AXIS)
        seen &= position >= tl.expand_dims(rows.since, AXIS)
    return seen
