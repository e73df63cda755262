"""Instructions that each thread carries out by itself, in its registers."""

import operator

import numpy as np

from . import arithmetic as n
from .apply import apply
from .moves import MOVES
from .registers import TYPES
from .text import Instruction

COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _fma(i):
    kind = i.op[-1]
    exact = {"f64": n.fma64, "f32": n.fma32}.get(kind, n.fma32)
    if kind == "f16":
        exact = lambda *xs: n.fma32(*xs).astype(np.float16)  # noqa: E731
    return apply(i, exact, [kind] * 3, kind)


def _setp(i):
    kind, name = i.op[-1], i.op[1]
    if len(i.op) != 3 or len(i.args) != 3:
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    floating = "f" in kind
    if name in COMPARE:
        compare = COMPARE[name]
        if name == "ne" and floating:
            # ordered: false where one is NaN
            compare = lambda a, b: (a < b) | (a > b)  # noqa: E731
    elif name[-1] == "u" and name[:-1] in COMPARE:
        plain = COMPARE[name[:-1]]
        compare = lambda a, b: plain(a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
    elif name in ("num", "nan"):
        wanted = name == "nan"
        compare = lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted  # noqa: E731
    else:
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    return apply(i, compare, [kind, kind], "pred")


def _shift(function):
    def make(i):
        kind = i.op[-1]
        width = np.dtype(TYPES[kind]).itemsize * 8

        def shift(x, by):
            # past the last bit nothing is left but the sign
            inside = function(x, np.minimum(by, np.uint32(width - 1)).astype(x.dtype))
            if function is np.right_shift and x.dtype.kind == "i":
                return inside
            return np.where(by >= width, x.dtype.type(0), inside)

        return apply(i, shift, [kind, "u32"], kind)

    return make


_shl, _shr = _shift(np.left_shift), _shift(np.right_shift)


def _mul(i):
    kind = i.op[-1]
    if i.op[1] == "wide":
        wide = f"{kind[0]}{int(kind[1:]) * 2}"
        to = TYPES[wide]
        return apply(i, lambda a, b: a.astype(to) * b.astype(to), [kind] * 2, wide)
    return apply(i, n.high_half if i.op[1] == "hi" else np.multiply, [kind] * 2, kind)


def _mad(i):
    kind = i.op[-1]
    if i.op[1] == "wide":
        wide = f"{kind[0]}{int(kind[1:]) * 2}"
        to = TYPES[wide]
        return apply(i, lambda a, b, c: a.astype(to) * b.astype(to) + c, [kind, kind, wide], wide)
    if i.op[1] != "lo":
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    return apply(i, lambda a, b, c: a * b + c, [kind] * 3, kind)


def _div(i):
    kind = i.op[-1]
    return apply(i, np.divide if kind[0] == "f" else n.divide, [kind] * 2, kind)


def _popc(i):
    count = lambda x: np.bitwise_count(x).astype(np.uint32)  # noqa: E731
    return apply(i, count, [i.op[-1]], "u32")


def _bfe(i):
    kind = i.op[-1]
    width = np.dtype(TYPES[kind]).itemsize * 8
    char = TYPES[kind]

    def extract(x, begin, length):
        begin, length = (y.astype(np.int64) & 255 for y in (begin, length))
        # down to the last bit, then up to the first and back, with zeros or the sign
        high = x >> np.minimum(begin, width - 1).astype(char)
        if x.dtype.kind == "u":
            high = np.where(begin < width, high, char(0))
        away = np.clip(width - length, 0, width - 1).astype(char)
        return np.where(length == 0, char(0), (high << away) >> away)

    return apply(i, extract, [kind, "u32", "u32"], kind)


def _min(i):
    return _extreme(i, np.fmin, np.minimum, lambda a, b: -(-a + -b))


def _max(i):
    return _extreme(i, np.fmax, np.maximum, np.add)


def _extreme(i, skip_nan, keep_nan, of_zeros):
    kind, function = i.op[-1], keep_nan if "NaN" in i.op else skip_nan

    def pick(a, b):
        result = function(a, b)
        if result.dtype.kind == "f":
            # -0 is less than 0
            result = np.where((a == 0) & (b == 0), of_zeros(a, b), result)
        return np.maximum(result, 0) if "relu" in i.op else result

    return apply(i, pick, [kind] * 2, kind)


def _rcp(i):
    if i.op[-1] == "f64" and "approx" in i.op:
        # an approximation whose lower half is zero
        upper = np.uint64(0xFFFFFFFF00000000)
        return apply(
            i, lambda x: ((1 / x).view(np.uint64) & upper).view(np.float64), ["f64"], "f64"
        )
    return apply(i, lambda x: x.dtype.type(1) / x, [i.op[-1]], i.op[-1])


def _lg2(i):
    return apply(i, lambda x: np.log2(x.astype(np.float64)).astype(np.float32), ["f32"], "f32")


def _ex2(i):
    return apply(i, lambda x: np.exp2(x.astype(np.float64)).astype(np.float32), ["f32"], "f32")


def _rsqrt(i):
    return apply(i, lambda x: np.float32(1) / np.sqrt(x), ["f32"], "f32")


SIMPLE = {
    "add": np.add,
    "sub": np.subtract,
    "rem": np.fmod,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "sqrt": np.sqrt,
}
OTHERS = {
    "fma": _fma,
    "setp": _setp,
    "shl": _shl,
    "shr": _shr,
    "mul": _mul,
    "mad": _mad,
    "div": _div,
    "popc": _popc,
    "bfe": _bfe,
    "min": _min,
    "max": _max,
    "rcp": _rcp,
    "lg2": _lg2,
    "ex2": _ex2,
    "rsqrt": _rsqrt,
    **MOVES,
}
# parts of an instruction's name beside types, .rn and .ftz
PARTS = {
    "mul": ("lo", "hi", "wide"),
    "mad": ("lo", "wide"),
    "min": ("NaN", "relu"),
    "max": ("NaN", "relu"),
    "div": ("full", "approx"),
    "rcp": ("approx",),
    "lg2": ("approx",),
    "ex2": ("approx",),
    "rsqrt": ("approx",),
    "cvt": ("rzi", "rmi", "rpi", "rni"),
    "setp": (*COMPARE, *(f"{name}u" for name in COMPARE), "num", "nan"),
}


def compiled(i: Instruction):
    """f(crew, mask) that carries the instruction out."""
    name, kind = i.op[0], i.op[-1]
    # parts that change a result, as .sat and .rz do, are done or refused
    unknown = {*i.op[1:]} - {*TYPES, "rn", "ftz", *PARTS.get(name, ())}
    if unknown:
        raise NotImplementedError(f"no .{' .'.join(sorted(unknown))} here: {i}")
    if name in OTHERS:
        return OTHERS[name](i)
    if name not in SIMPLE:
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    return apply(i, SIMPLE[name], [kind] * (len(i.args) - 1), kind)
