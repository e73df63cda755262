"""A quantised W in float32, a few rows at a time: what the product of a gradient reads.

A tile has the numbers of TILE rows side by side, so whole vectors of W^T are written. They have the
bits of `formats.rows_of`.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from numba import types
from numba.extending import intrinsic

from csd.kernels.layers.quantized.cpu.product import AHEAD, copied
from csd.kernels.layers.quantized.cpu.tile import QuantizedTile, instructions
from csd.kernels.layers.quantized.formats import BLOCK, FORMATS, TILE, Format
from csd.kernels.numba.simd import FLOAT, ints, splat
from csd.kernels.numba.threads import ByThreads, by_threads, share

# numbers of W^T that a CPU's caches hold until the product reads them
CHUNK = 1 << 19
# set in copies of the function that calls it
columns: Any = None


def dequantized(weight: Any) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield consecutive rows of W, and these rows [R, K] float32, valid until the next ones."""
    K, first = weight.shape[1], 0
    most = max(1, CHUNK // (K * TILE))
    room = torch.empty(K * most * TILE)
    for part in weight.parts:
        end, write = first + part.rows, _loop_of(part.format)
        for tiles in part.data.split(most):
            columns = room[: K * len(tiles) * TILE].view(K, -1)
            write(columns.numel(), *tiles.shape, K, tiles.data_ptr(), columns.data_ptr())
            # the last tiles have rows that the matrix lacks
            rows = slice(first, min(first + columns.shape[1], end))
            if rows.stop > first:
                yield rows, columns[:, : rows.stop - first].T
            first = rows.stop


@cache
def _loop_of(name: str) -> ByThreads:
    """The loop of all tiles of a format, compiled on first use."""
    columns = _columns_of(FORMATS[name])
    return by_threads(copied(_write_tiles, f"_write_{name}", columns=columns))


def _write_tiles(part, parts, tiles, size, K, data, out):
    """A part's share of W^T [K, tiles * TILE] at `out`; `columns` is the intrinsic of W's type."""
    begin, end = share(tiles, part, parts)
    for t in range(begin, end):
        columns(K, data + t * size, out + t * TILE * 4, tiles * TILE)


def _columns_of(format: Format) -> Any:
    @intrinsic
    def columns(typing_context, K, weight, out, stride):
        """Write out[k stride + c] = w[c, k] for the tile at `weight`; out: address of float32."""

        def generate(context, builder, signature, args):
            K, weight, out, stride = args
            nothing, ahead = K.type(0), builder.add(weight, K.type(AHEAD))
            tile = _Columns(builder, format, out, stride)
            tile.emit(K, nothing, nothing, weight, *[nothing] * 5, ahead)
            return context.get_dummy_value()

        return types.none(*[types.intp] * 4), generate

    return columns


class _Columns(QuantizedTile):
    """Code of one tile, which writes a block's numbers where `QuantizedTile` multiplies them."""

    def __init__(self, builder: Any, format: Format, out: Any, stride: Any):
        super().__init__(builder, format, instructions()[0], 0, 1)
        self.out, self.stride = out, stride

    def _block(self, i: Any, at: Any, d: list | None, d_low: list | None) -> None:
        b, f = self.b, self.format
        offset = splat(b, FLOAT(float(f.offset)), self.lanes)
        width = TILE * f.groups * (1 if f.nested else 2)
        each, vectors = BLOCK // 4 // f.groups, self._numbers(at)
        for g in range(f.groups):
            scales = self._scales(at, f.numbers_size, g, d)
            lows = self._scales(at, f.numbers_size + width, g, d_low) if f.minima else []
            for c, j, byte in product(
                range(len(vectors)), range(g * each, (g + 1) * each), range(4)
            ):
                q = b.lshr(vectors[c].at(j), ints(self.lanes, 8 * byte))
                q = b.and_(q, ints(self.lanes, 255))
                w = b.fmul(b.fsub(b.sitofp(q, self.floats), offset), scales[c])
                w = b.fadd(w, lows[c]) if lows else w
                k = b.add(b.mul(i, i.type(BLOCK)), i.type(4 * j + byte))
                to = b.add(self.out, b.mul(b.mul(k, self.stride), k.type(4)))
                to = b.add(to, to.type(4 * self.lanes * c))
                b.store(w, b.inttoptr(to, self.floats.as_pointer()), align=4)
