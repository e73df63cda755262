"""Instructions that each thread carries out by itself, in its registers."""

import operator

import numpy as np

from . import arithmetic as n
from .text import Float, Instruction, Register

TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
# of a register's width, as a pattern of bits
BITS = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


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


def compiled(i: Instruction):
    """f(crew, mask) that carries the instruction out."""
    make = globals().get(f"_{i.op[0]}")
    if make is not None:
        return make(i)
    if i.op[0] not in SIMPLE:
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    kind = i.op[-1]
    return _apply(i, SIMPLE[i.op[0]], [kind] * (len(i.args) - 1), kind)


def _apply(i: Instruction, function, sources: list[str], target: str):
    """target = function(sources), in float32 and rounded where the type is bfloat16."""
    put = writer(i.args[0], target)
    gets = [reader(arg, kind) for arg, kind in zip(i.args[1:], sources, strict=True)]
    if "bf16x2" in (target, *sources) or "f16x2" in (target, *sources):
        function = _halves(function, target)
    elif "bf16" in (target, *sources):
        function = _in_float32(function, sources, target)
    elif "ftz" in i.op:
        plain = function
        function = lambda *xs: n.flush(plain(*map(n.flush, xs)))  # noqa: E731
    if len(gets) == 2:
        a, b = gets
        return lambda crew, mask: put(crew, function(a(crew), b(crew)), mask)
    return lambda crew, mask: put(crew, function(*[get(crew) for get in gets]), mask)


def _in_float32(function, sources, target):
    def call(*xs):
        wide = [n.of_bf16(x) if k == "bf16" else x for x, k in zip(xs, sources, strict=True)]
        found = function(*wide)
        return n.to_bf16(found) if target == "bf16" else found

    return call


def _halves(function, kind):
    def call(*xs):
        parts = []
        for shift in (0, 16):
            halves = [(x >> np.uint32(shift)).astype(np.uint16) for x in xs]
            if kind == "bf16x2":
                part = n.to_bf16(function(*map(n.of_bf16, halves)))
            else:
                wide = [x.view(np.float16).astype(np.float32) for x in halves]
                part = function(*wide).astype(np.float16).view(np.uint16)
            parts.append(part.astype(np.uint32) << np.uint32(shift))
        return parts[0] | parts[1]

    return call


def _fma(i):
    kind = i.op[-1]
    exact = {"f64": n.fma64, "f32": n.fma32}.get(kind, n.fma32)
    if kind == "f16":
        exact = lambda *xs: n.fma32(*xs).astype(np.float16)  # noqa: E731
    return _apply(i, exact, [kind] * 3, kind)


def _mov(i):
    target, source = i.args
    if isinstance(target, list):
        return _unpack(target, source)
    if isinstance(source, list):
        return _pack(target, source)
    return _apply(i, lambda x: x, [i.op[-1]], i.op[-1])


def _unpack(targets, source):
    get = reader(source, f"b{source.width}")
    width = source.width // len(targets)
    puts = [writer(target, f"b{width}") for target in targets]

    def unpack(crew, mask):
        value = get(crew)
        parts = [(value >> value.dtype.type(k * width)).astype(BITS[width])
                 for k in range(len(puts))]  # fmt: skip
        for put, part in zip(puts, parts, strict=True):
            put(crew, part, mask)

    return unpack


def _pack(target, sources):
    width = target.width // len(sources)
    gets = [reader(source, f"b{width}") for source in sources]
    put = writer(target, f"b{target.width}")

    def pack(crew, mask):
        wide = BITS[target.width]
        value = wide(0)
        for k, get in enumerate(gets):
            value = value | (get(crew).astype(wide) << wide(k * width))
        put(crew, value, mask)

    return pack


def _cvt(i):
    target, source = i.op[-2:]
    if target in ("bf16x2", "f16x2"):
        narrow = n.to_bf16 if target == "bf16x2" else _to_f16
        # the first source is the upper half
        pair = lambda a, b: (narrow(a).astype(np.uint32) << np.uint32(16)) | narrow(b)  # noqa: E731
        put, a, b = writer(i.args[0], "b32"), *(reader(x, "f32") for x in i.args[1:])
        return lambda crew, mask: put(crew, pair(a(crew), b(crew)), mask)
    if target == "bf16" or source == "bf16":
        return _apply(i, lambda x: x, [source], target)
    dtype = np.dtype(TYPES[target])

    def convert(x):
        if x.dtype.kind != "f":
            return x.astype(dtype)
        rounding = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}.get(i.op[1])
        if rounding is not None:
            x = rounding(x)
        if dtype.kind == "f":
            return x.astype(dtype)
        info = np.iinfo(dtype)
        # saturates; the largest integers have no float of their own
        inside = np.nan_to_num(np.clip(x, float(info.min), float(info.max)))
        top = x >= float(info.max)
        return np.where(top, info.max, np.where(top, 0, inside).astype(dtype)).astype(dtype)

    return _apply(i, convert, [source], target)


def _to_f16(x):
    return x.astype(np.float16).view(np.uint16)


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
    return _apply(i, compare, [kind, kind], "pred")


def _selp(i):
    kind = {"f32": "b32", "f64": "b64", "f16": "b16", "bf16": "b16"}.get(i.op[-1], i.op[-1])
    put, condition = writer(i.args[0], kind), reader(i.args[3], "pred")
    a, b = (reader(x, kind) for x in i.args[1:3])
    return lambda crew, mask: put(crew, np.where(condition(crew), a(crew), b(crew)), mask)


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

        return _apply(i, shift, [kind, "u32"], kind)

    return make


_shl, _shr = _shift(np.left_shift), _shift(np.right_shift)


def _mul(i):
    kind = i.op[-1]
    if i.op[1] == "wide":
        wide = f"{kind[0]}{int(kind[1:]) * 2}"
        to = TYPES[wide]
        return _apply(i, lambda a, b: a.astype(to) * b.astype(to), [kind] * 2, wide)
    return _apply(i, n.high_half if i.op[1] == "hi" else np.multiply, [kind] * 2, kind)


def _mad(i):
    kind = i.op[-1]
    if i.op[1] == "wide":
        wide = f"{kind[0]}{int(kind[1:]) * 2}"
        to = TYPES[wide]
        return _apply(
            i, lambda a, b, c: a.astype(to) * b.astype(to) + c, [kind, kind, wide], wide
        )
    if i.op[1] != "lo":
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    return _apply(i, lambda a, b, c: a * b + c, [kind] * 3, kind)


def _div(i):
    kind = i.op[-1]
    return _apply(i, np.divide if kind[0] == "f" else n.divide, [kind] * 2, kind)


def _popc(i):
    count = lambda x: np.bitwise_count(x).astype(np.uint32)  # noqa: E731
    return _apply(i, count, [i.op[-1]], "u32")


def _bfe(i):
    kind = i.op[-1]
    width = np.dtype(TYPES[kind]).itemsize * 8
    char = TYPES[kind]

    def extract(x, begin, length):
        # to the top, and back with zeros or the sign
        up = np.clip(width - begin.astype(np.int64) - length, 0, width - 1).astype(char)
        down = np.clip(width - length.astype(np.int64), 0, width - 1).astype(char)
        return np.where(length == 0, char(0), (x << up) >> down)

    return _apply(i, extract, [kind, "u32", "u32"], kind)


def _prmt(i):
    return _apply(i, n.pick_bytes, ["b32"] * 3, "b32")


def _min(i):
    if "relu" in i.op:
        return _apply(i, lambda a, b: np.maximum(np.minimum(a, b), 0), [i.op[-1]] * 2, i.op[-1])
    return _extreme(i, np.fmin, np.minimum)


def _max(i):
    return _extreme(i, np.fmax, np.maximum)


def _extreme(i, skip_nan, keep_nan):
    return _apply(i, keep_nan if "NaN" in i.op else skip_nan, [i.op[-1]] * 2, i.op[-1])


def _rcp(i):
    if i.op[-1] == "f64":
        # an approximation whose lower half is zero
        upper = np.uint64(0xFFFFFFFF00000000)
        return _apply(i, lambda x: ((1 / x).view(np.uint64) & upper).view(np.float64),
                      ["f64"], "f64")  # fmt: skip
    return _apply(i, lambda x: np.float32(1) / x, ["f32"], "f32")


def _lg2(i):
    return _apply(i, lambda x: np.log2(x.astype(np.float64)).astype(np.float32), ["f32"], "f32")


def _ex2(i):
    return _apply(i, lambda x: np.exp2(x.astype(np.float64)).astype(np.float32), ["f32"], "f32")


def _rsqrt(i):
    return _apply(i, lambda x: np.float32(1) / np.sqrt(x), ["f32"], "f32")


SIMPLE = {
    "add": np.add, "sub": np.subtract, "rem": np.fmod, "neg": np.negative, "abs": np.abs,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "sqrt": np.sqrt,
}  # fmt: skip
