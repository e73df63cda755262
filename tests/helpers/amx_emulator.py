"""AMX's instructions for bfloat16 in Python, for CPUs that do not have them.

Each checks what the CPU checks, and counts what it would refuse as a fault. State and arithmetic
are those of Intel's Instruction Set Extensions Reference. With CSD_AMX=1 all tests of a process run
as on such a CPU, in one thread (`tests/conftest.py`).
"""

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit

from csd.kernels.cpu import amx
from csd.kernels.cpu.numbers import memory

BYTES, HALVES, SINGLES = (np.empty(0, kind) for kind in (np.uint8, np.uint16, np.float32))

# eight tiles of 16 rows of 64 bytes, the configuration, and how many faults there were
TILES, CONFIG, FAULTS = (np.zeros(n, np.uint8) for n in (8 * 1024, 64, 1))
AT, SET, FAULT = (x.ctypes.data for x in (TILES, CONFIG, FAULTS))


@njit
def _shape(tile):
    """Rows, and bytes of a row."""
    config = memory(SET, 64, BYTES)
    return np.int64(config[48 + tile]), np.int64(config[16 + 2 * tile])


@njit
def _wide(half):
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@njit
def _require(fine):
    memory(FAULT, 1, BYTES)[0] |= not fine


@cfunc("void(intp)")
def ldtilecfg(address):
    given, config = memory(address, 64, BYTES), memory(SET, 64, BYTES)
    _require(given[0] == 1 and address % 64 == 0)
    for byte in range(64):
        config[byte] = given[byte]
        used = byte == 0 or 16 <= byte < 32 or 48 <= byte < 56
        _require(used or given[byte] == 0)
    for tile in range(8):
        rows, width = _shape(tile)
        _require(rows <= 16 and width <= 64 and config[17 + 2 * tile] == 0)
    memory(AT, 8 * 1024, BYTES)[:] = 0


@cfunc("void(uint8, intp, int64)")
def tileloadd64(tile, address, stride):
    rows, width = _shape(tile)
    _require(rows > 0 and width > 0)
    to = memory(AT + 1024 * np.int64(tile), (16, 64), BYTES)
    to[:] = 0
    for r in range(rows):
        to[r, :width] = memory(address + r * stride, width, BYTES)


@cfunc("void(uint8, intp, int64)")
def tilestored64(tile, address, stride):
    rows, width = _shape(tile)
    _require(rows > 0 and width > 0)
    given = memory(AT + 1024 * np.int64(tile), (16, 64), BYTES)
    for r in range(rows):
        memory(address + r * stride, width, BYTES)[:] = given[r, :width]


@cfunc("void(uint8, uint8, uint8)")
def tdpbf16ps(total, left, right):
    rows, width = _shape(total)
    _require(total != left and total != right and left != right)
    _require(_shape(left)[0] == rows and _shape(right)[1] == width)
    pairs = _shape(left)[1] // 4
    _require(pairs == _shape(right)[0] and pairs > 0)
    sums = memory(AT + 1024 * np.int64(total), (16, 16), SINGLES)
    a = memory(AT + 1024 * np.int64(left), (16, 32), HALVES)
    b = memory(AT + 1024 * np.int64(right), (16, 32), HALVES)
    for m in range(rows):
        for n in range(width // 4):
            part = np.zeros(2, np.float32)
            for k in range(pairs):
                for i in range(2):
                    product = np.float64(_wide(a[m, 2 * k + i])) * _wide(b[k, 2 * n + i])
                    part[i] = np.float32(np.float64(part[i]) + product)
            sums[m, n] += part[0] + part[1]


@cfunc("void(uint8)")
def tilezero(tile):
    rows, width = _shape(tile)
    _require(rows > 0 and width > 0)
    memory(AT + 1024 * np.int64(tile), 1024, BYTES)[:] = 0


@cfunc("void()")
def tilerelease():
    memory(SET, 64, BYTES)[:] = 0


EVERY = {
    "ldtilecfg": ldtilecfg, "tileloadd64": tileloadd64, "tilestored64": tilestored64,
    "tdpbf16ps": tdpbf16ps, "tilezero": tilezero, "tilerelease": tilerelease,
}  # fmt: skip


def instruction(builder, name, *args):
    """In place of `csd.kernels.cpu.amx._instruction`."""
    args = [builder.ptrtoint(x, amx.LONG) if x.type.is_pointer else x for x in args]
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in args])
    address = ir.Constant(amx.LONG, EVERY[name].address)
    builder.call(builder.inttoptr(address, kind.as_pointer()), args)


def install():
    """Loops compiled from now on call the emulator. numba's cache must be this process's alone."""
    amx._instruction, amx.usable = instruction, lambda: True
    # there is one set of tiles
    torch.set_num_threads(1)
