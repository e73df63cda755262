"""The parts of attention's memory: each within it, from a line on, and none in another."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("numba")

from csd.kernels.attention.cpu.pages import PAGE, PARTS, workspace, workspace_bytes
from csd.kernels.numba.lanes import WIDTH
from csd.kernels.numba.simd import LINE


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "many,words,columns,wide", [(1, 8, 80, 16), (27, 32, 176, 64), (5, 7, 96, 16)]
)
@pytest.mark.parametrize("shift", [0, 1, 32, 63])
def test_parts_are_apart_and_begin_at_lines(dtype, many, words, columns, wide, shift):
    like = np.empty(0, dtype)
    size = workspace_bytes(many, words, columns, wide, like)
    buffer = np.full(size + shift + LINE, 7, np.uint8)[shift:]
    address = buffer.ctypes.data
    *parts, work = workspace(address, many, words, columns, wide, like)
    parts += work
    shapes = [(many, words), (many, columns), (many, wide), (many,), (WIDTH,)]
    shapes += [(PAGE * wide,), (many, PAGE // 2)]
    assert [x.shape for x in parts] == shapes and len(parts) == PARTS
    starts = sorted((x.ctypes.data, x.ctypes.data + x.nbytes) for x in parts)
    assert all(start % LINE == 0 for start, _ in starts)
    assert all(end <= after for (_, end), (after, _) in pairwise(starts))
    assert address <= starts[0][0] and starts[-1][1] <= address + size
    _query, _score, sums, *_others, tile, _pairs = parts
    assert not (sums.any() or tile.any())
    assert (buffer[size:] == 7).all()
