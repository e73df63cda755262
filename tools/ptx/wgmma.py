"""wgmma: four warps multiply matrices that lie in shared memory, on sm_90."""

import numpy as np

from .registers import reader, writer
from .text import Instruction
from .warps import Divergence, fragment_a, fragment_c, halves, product, put_c, together


def compiled(i: Instruction):
    if i.op[1] != "mma_async":
        # fence, commit_group, wait_group: here a product is there at once
        return lambda crew, mask: together(crew, mask, i)
    rows, columns, depth = (int(x) for x in i.op[4][1:].replace("n", " ").replace("k", " ").split())
    kind = i.op[-1]
    if (rows, depth, i.op[5]) != (64, 16, "f32") or kind not in ("bf16", "f16"):
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    puts = [writer(target, "f32") for target in i.args[0]]
    gets = [reader(target, "f32") for target in i.args[0]]
    keep, right = reader(i.args[3], "pred"), reader(i.args[2], "u64")
    if i.args[4:6] != [1, 1]:
        raise NotImplementedError(f"a sign: {i}")
    in_registers = isinstance(i.args[1], list)
    transposed = i.args[6:] if in_registers else i.args[7:]
    if in_registers:
        parts = [reader(x, "b32") for x in i.args[1]]
    else:
        left = reader(i.args[1], "u64")
        if i.args[6]:
            raise NotImplementedError(f"a transposed left side: {i}")

    def multiply(crew, mask):
        fours = together(crew, mask, i).reshape(-1, 4)
        if (fours.any(1) != fours.all(1)).any():
            raise Divergence(f"warps of one group are apart at {i}")
        b = _tile(crew, right(crew), columns, bool(transposed[0]), fours[:, 0], kind, i)
        if in_registers:
            a = fragment_a(crew, parts, kind).reshape(-1, 64, 16)
        else:
            a = _tile(crew, left(crew), 64, False, fours[:, 0], kind, i)
        result = product(a, b.swapaxes(1, 2))
        keeps = np.broadcast_to(keep(crew), crew.threads)[::128, None, None]
        result = np.where(keeps, result + fragment_c(crew, gets).reshape(-1, 64, columns), result)
        put_c(crew, puts, result.reshape(-1, 16, columns), mask)

    return multiply


def _tile(crew, descriptor, rows: int, transposed: bool, active, kind: str, i) -> np.ndarray:
    """[groups of four warps, rows, 16] of what the descriptor of the active ones points to.

    Rows of 128, 64 or 32 bytes ("swizzle") follow one another, eight to a pattern in which bits 4
    to 6 of an address are XORed with bits 7 to 9 as far as the row is long. They lie along the
    depth, or across it where the matrix is transposed.
    """
    word = np.broadcast_to(descriptor, crew.threads).reshape(-1, 128)[:, 0].astype(np.int64)
    begin, lead, stride = ((word >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    mode = int(word[active][0] >> 62 & 3)
    if mode == 0:
        raise NotImplementedError(f"no swizzle: {i}")
    width = {1: 128, 2: 64, 3: 32}[mode]
    row, column = np.arange(rows)[:, None], np.arange(16)[None, :]
    # outer: counts rows of a pattern; inner: goes along one
    outer, inner = (column, row) if transposed else (row, column)
    per = width // 2
    at = (outer % 8) * width + (inner % per) * 2
    at = begin[:, None, None] + at + (outer // 8) * stride[:, None, None]
    at = at + (inner // per) * lead[:, None, None]
    bits = {128: 7, 64: 3, 32: 1}[width]
    at = at ^ ((at >> 7 & bits) << 4)
    result = np.zeros(at.shape, np.uint16)
    result[active] = crew.memory("shared").halves(crew, active, at[active], i)
    return halves(kind, result)
