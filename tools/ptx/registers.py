"""Registers and constants as arrays of a value for each thread, and back."""

import numpy as np

from .text import Float, Register

TYPES = {
    "pred": np.bool_,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
}
# type of a register of a width, as a pattern of bits
BITS = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def reader(arg, kind: str):
    """f(crew): the argument's values as the type, one a thread, or one for all."""
    dtype = np.dtype(TYPES[kind])
    if isinstance(arg, Register):
        i, width = arg.index, BITS[arg.width]
        if dtype.itemsize == np.dtype(width).itemsize:
            return lambda crew: crew.registers[dtype.char][i]
        # the low bits of a wider register
        return lambda crew: crew.registers[np.dtype(width).char][i].astype(dtype)
    if isinstance(arg, Float):
        # a move takes the bits as they are
        value = np.array(arg.bits, BITS[arg.width]).view(dtype)
    elif isinstance(arg, str):
        return lambda crew: crew.special(arg)
    elif kind == "pred":
        value = np.array(bool(arg))
    else:
        bits = np.dtype(f"u{dtype.itemsize}")
        value = np.array(arg & (256**dtype.itemsize - 1), bits).view(dtype)
    return lambda crew: value


def writer(arg, kind: str):
    """f(crew, values, mask): into the threads of the mask; wider registers take the sign along."""
    if arg == "_":
        return lambda crew, values, mask: None
    dtype, width = np.dtype(TYPES[kind]), np.dtype(BITS[arg.width])
    i = arg.index
    if dtype.itemsize < width.itemsize:
        wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{width.itemsize}").char

        def widen(crew, values, mask):
            values = np.asarray(values, dtype).astype(wide)
            np.copyto(crew.registers[wide][i], values, where=mask)

        return widen
    char = dtype.char
    return lambda crew, values, mask: np.copyto(
        crew.registers[char][i], values, where=mask, casting="unsafe"
    )
