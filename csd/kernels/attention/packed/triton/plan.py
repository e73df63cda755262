"""Pairs of tiles of rows and blocks of keys that a packed attention multiplies.

A tile has some rows and, for one key-value head, their query heads. A pair is visited if a row of
the tile may attend to a key of the block: by the ends of the block's rows, and with a window or a
chunk by the first position that each row attends to. `visits` lists for each tile its blocks in
order, and `readers` for each block its tiles. PyTorch computes both without reading the device.
"""

from typing import NamedTuple

import torch


class PackedWork(NamedTuple):
    """Lists of a layout: T tiles of rows, B blocks of keys."""

    first: torch.Tensor | None  # [R] int32, first position that a row attends to
    visits: torch.Tensor  # [T, B] int32, blocks of a tile, the first `visit_count` of a row
    visit_count: torch.Tensor  # [T] int32
    readers: torch.Tensor  # [B, T] int32, tiles of a block
    reader_count: torch.Tensor  # [B] int32


def plan_packed(
    end: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int32
    rows: int,
    keys: int,
    window: int | None,
    chunk: int | None,
) -> PackedWork:
    """rows: of a tile. keys: of a block."""
    R, first = end.shape[0], None
    index = torch.arange(R, device=end.device, dtype=torch.int32)
    # the last row of a tile and the largest end of a block, by tile and block
    seen = (index[::keys] <= _largest(index, rows)[:, None]) & (
        _largest(end, keys) > index[::rows, None]
    )
    if window is not None or chunk is not None:
        first = torch.zeros_like(position)
        if window is not None:
            first = torch.maximum(first, position - (window - 1))
        if chunk is not None:
            first = torch.maximum(first, position - position % chunk)
        seen &= _largest(position, keys) >= -_largest(-first, rows)[:, None]
    lists = [part for pairs in (seen, seen.T) for part in _listed(pairs)]
    return PackedWork(first, *lists)


def _largest(x: torch.Tensor, size: int) -> torch.Tensor:
    """The largest number of each run of `size` numbers, the last run possibly shorter."""
    count = -(-x.shape[0] // size)
    index = torch.arange(count * size, device=x.device).clamp(max=x.shape[0] - 1)
    return x[index].view(count, size).amax(1)


def _listed(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the True ones of each row, in order and first, and their number."""
    order = torch.sort((~pairs).to(torch.int8), dim=1, stable=True)[1]
    # of a transposed matrix the order is one too
    return order.int().contiguous(), pairs.sum(1, dtype=torch.int32)
