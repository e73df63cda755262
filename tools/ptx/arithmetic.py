"""Arithmetic that NumPy lacks: bfloat16, one rounding for a product and a sum, high halves."""

import numpy as np

U16, U32, U64 = np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64


def of_bf16(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, U16).astype(U32) << U32(16)).view(F32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; a NaN stays one."""
    bits = np.asarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FFF), rounded).astype(U16)


def flush(x: np.ndarray) -> np.ndarray:
    """.ftz: numbers too small for a full mantissa are zero, of the same sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def fma32(a, b, c) -> np.ndarray:
    # the product is exact in float64; the sum's rounding must not be one more
    a, b, c = (np.asarray(x, F32).astype(F64) for x in (a, b, c))
    return _odd_sum(a * b, c).astype(F32)


def fma64(a, b, c) -> np.ndarray:
    """S. Boldo and G. Melquiond, Emulation of a FMA and correctly rounded sums (2008)."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, F64) for x in (a, b, c)))
    product, below = _two_product(a, b)
    high, low = _two_sum(c, below)
    top, rest = _two_sum(product, high)
    exact = top + _odd_sum(low, rest)
    plain = a * b + c
    # products at which a splitting overflows, or its error underflows
    size = np.abs(product)
    safe = (np.abs(a) < 1e150) & (np.abs(b) < 1e150) & (size < 1e300) & (size > 1e-250)
    return np.where(safe & (np.abs(c) < 1e300), exact, plain)


def high_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """High half of a product of numbers of up to 32 bits, or of unsigned 64-bit ones."""
    if a.dtype.itemsize <= 4:
        wide = np.int64 if a.dtype.kind == "i" else U64
        bits = wide(8 * a.dtype.itemsize)
        return ((a.astype(wide) * b.astype(wide)) >> bits).astype(a.dtype)
    if a.dtype.kind != "u":
        raise NotImplementedError("mul.hi.s64")
    mask, half = U64(0xFFFFFFFF), U64(32)
    ah, al, bh, bl = a >> half, a & mask, b >> half, b & mask
    middle = ((al * bl) >> half) + ((ah * bl) & mask) + al * bh
    return ah * bh + ((ah * bl) >> half) + (middle >> half)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide integers, rounding towards zero; the result for a divisor of 0 is undefined."""
    if a.dtype.kind == "u":
        return a // np.where(b == 0, b.dtype.type(1), b)
    by = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // by
    return quotient + ((quotient * by != a) & ((a < 0) != (by < 0))).astype(a.dtype)


def pick_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: four of the eight bytes of (b, a), by four bits of the selector each."""
    both = (b.astype(U64) << U64(32)) | a.astype(U64)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), U64)
    for i in range(4):
        pick = (selector.astype(U64) >> U64(4 * i)) & U64(15)
        byte = (both >> ((pick & U64(7)) * U64(8))) & U64(255)
        byte = np.where(pick & U64(8), (byte >> U64(7)) * U64(255), byte)
        result |= byte << U64(8 * i)
    return result.astype(U32)


def _two_sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a, b):
    p = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _split(x):
    c = F64(134217729.0) * x
    high = c - (c - x)
    return high, x - high


def _odd_sum(a, b):
    """a + b, rounded to the neighbour whose last bit is 1 where it is not exact."""
    s, error = _two_sum(a, b)
    even = (np.asarray(s).view(U64) & U64(1)) == 0
    inexact = np.isfinite(s) & (error != 0) & ~np.isnan(error)
    other = np.nextafter(s, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, other, s)
