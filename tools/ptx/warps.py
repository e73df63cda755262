"""Instructions that the 32 threads of a warp carry out together."""

import numpy as np

from . import arithmetic as n
from .memory import address
from .registers import reader, writer
from .text import Instruction

_LANE = np.arange(32)


class Divergence(RuntimeError):
    """Threads of a warp were elsewhere when the others exchanged registers."""


def together(crew, mask, i: Instruction) -> np.ndarray:
    """Warps [W] that carry the instruction out, each whole."""
    if mask is True:
        return np.ones(crew.threads // 32, bool)
    lanes = mask.reshape(-1, 32)
    if (lanes.any(1) != lanes.all(1)).any():
        raise Divergence(f"threads of one warp are apart at {i}")
    return lanes.all(1)


def _warps(crew, values) -> np.ndarray:
    """[W, 32]"""
    return np.broadcast_to(values, crew.threads).reshape(-1, 32)


def _shfl(i):
    put, kind = writer(i.args[0], "b32"), i.op[2]
    value, by, clamp = reader(i.args[1], "b32"), reader(i.args[2], "s32"), i.args[3]
    if clamp != (0 if kind == "up" else 31):
        raise NotImplementedError(f"parts of a warp: {i}")

    def shuffle(crew, mask):
        together(crew, mask, i)
        x, b = _warps(crew, value(crew)), _warps(crew, by(crew))
        source = {"bfly": _LANE ^ b, "up": _LANE - b, "down": _LANE + b, "idx": b & 31}[kind]
        source = np.where((source < 0) | (source > 31), _LANE, source)
        put(crew, np.take_along_axis(x, source, 1).reshape(-1), mask)

    return shuffle


REDUCTIONS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _redux(i):
    put, get, function = writer(i.args[0], i.op[-1]), reader(i.args[1], i.op[-1]), i.op[2]

    def reduce(crew, mask):
        together(crew, mask, i)
        x = _warps(crew, get(crew))
        result = REDUCTIONS[function].reduce(x, axis=1, dtype=x.dtype)
        put(crew, np.repeat(result, 32), mask)

    return reduce


def _bar(i):
    # bar.warp.sync: the warps here are in step anyway
    return lambda crew, mask: together(crew, mask, i)


def _rows(crew, at, count: int) -> np.ndarray:
    """Addresses [W, count, 8] of rows of 16 bytes: threads 8k to 8k + 7 hold matrix k's."""
    return _warps(crew, at(crew))[:, : 8 * count].reshape(-1, count, 8)


def _ldmatrix(i):
    count, transposed = int(i.op[4][1:]), "trans" in i.op
    puts, at = [writer(target, "b32") for target in i.args[0]], address(i.args[1])

    def load(crew, mask):
        warps = together(crew, mask, i)
        words = np.zeros((len(warps), count, 8, 4), np.uint32)
        rows = _rows(crew, at, count)[warps]
        words[warps] = crew.memory("shared").rows(crew, warps, rows, i)
        if transposed:
            # [W, count, 8, 8] of 16 bits
            flipped = words.view(np.uint16).swapaxes(2, 3)
            words = np.ascontiguousarray(flipped).view(np.uint32)
        for k, put in enumerate(puts):
            put(crew, words[:, k].reshape(-1), mask)

    return load


def _stmatrix(i):
    count = int(i.op[4][1:])
    gets, at = [reader(source, "b32") for source in i.args[1]], address(i.args[0])
    transposed = "trans" in i.op

    def store(crew, mask):
        warps = together(crew, mask, i)
        values = np.stack([_warps(crew, get(crew)) for get in gets], 1).reshape(-1, count, 8, 4)
        if transposed:
            flipped = values.view(np.uint16).swapaxes(2, 3)
            values = np.ascontiguousarray(flipped).view(np.uint32)
        rows = _rows(crew, at, count)[warps]
        crew.memory("shared").put_rows(crew, warps, rows, values[warps], i)

    return store


def halves(kind: str, words: np.ndarray) -> np.ndarray:
    """float32 [..., 2 n] of words [..., n] that hold two numbers each."""
    result = np.ascontiguousarray(words).view(np.uint16)
    return n.of_bf16(result) if kind == "bf16" else result.view(np.float16).astype(np.float32)


def fragment_a(crew, gets, kind: str) -> np.ndarray:
    """[W, 16, 16]: register 2 c + r of lane 4 g + t holds row g + 8 r, columns 8 c + 2 t, + 1."""
    words = np.stack([_warps(crew, get(crew)) for get in gets], -1).reshape(-1, 8, 4, 2, 2)
    result = halves(kind, words[..., None])
    # [W, g, t, c, r, 2] to [W, r, g, c, t, 2]
    return result.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)


def fragment_c(crew, gets) -> np.ndarray:
    """[W, 16, N]: registers 4 j to 4 j + 3 hold rows g and g + 8, columns 8 j + 2 t, + 1."""
    words = np.stack([_warps(crew, get(crew)) for get in gets], -1)
    parts = words.reshape(-1, 8, 4, len(gets) // 4, 2, 2)
    # [W, g, t, j, r, 2] to [W, r, g, j, t, 2]
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(len(words), 16, -1)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[.., R, C] of a [.., R, depth] and b [.., depth, C], added up in the order of the depth.

    NumPy's own product takes an order that changes with R and C, and with a row's place. A GPU's
    does not change with a row's place; its own order is not documented.
    """
    result = a[..., 0, None] * b[..., None, 0, :]
    for k in range(1, a.shape[-1]):
        result += a[..., k, None] * b[..., None, k, :]
    return result


def put_c(crew, puts, matrix: np.ndarray, mask) -> None:
    """The inverse of `fragment_c`."""
    parts = matrix.reshape(-1, 2, 8, len(puts) // 4, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    words = parts.reshape(-1, len(puts)).astype(np.float32)
    for k, put in enumerate(puts):
        put(crew, words[:, k], mask)


def _mma(i):
    if i.op[3] != "m16n8k16" or i.op[6] != "f32" or i.op[7] not in ("bf16", "f16"):
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    kind = i.op[7]
    puts = [writer(target, "f32") for target in i.args[0]]
    a, b = ([reader(x, "b32") for x in arg] for arg in i.args[1:3])
    c = [reader(x, "f32") for x in i.args[3]]

    def multiply(crew, mask):
        together(crew, mask, i)
        words = np.stack([_warps(crew, get(crew)) for get in b], -1).reshape(-1, 8, 4, 2, 1)
        # register c of lane 4 g + t holds column g, rows 8 c + 2 t, + 1
        right = halves(kind, words).transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        result = product(fragment_a(crew, a, kind), right) + fragment_c(crew, c)
        put_c(crew, puts, result, mask)

    return multiply


OPERATIONS = {
    "shfl": _shfl,
    "redux": _redux,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
    "bar": _bar,
}
