"""Instructions that move values, choose between them and change their types."""

import numpy as np

from . import arithmetic as n
from .apply import apply
from .registers import BITS, TYPES, reader, writer


def _mov(i):
    target, source = i.args
    if isinstance(target, list):
        return _unpack(target, source)
    if isinstance(source, list):
        return _pack(target, source)
    return apply(i, lambda x: x, [i.op[-1]], i.op[-1])


def _unpack(targets, source):
    get = reader(source, f"b{source.width}")
    width = source.width // len(targets)
    puts = [writer(target, f"b{width}") for target in targets]

    def unpack(crew, mask):
        value = get(crew)
        parts = [
            (value >> value.dtype.type(k * width)).astype(BITS[width]) for k in range(len(puts))
        ]
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
        return apply(i, lambda x: x, [source], target)
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
        top, none = x >= float(info.max), np.isnan(x)
        inside = np.where(top | none, 0, np.clip(x, float(info.min), float(info.max)))
        small = x.dtype != np.float64 and dtype.itemsize < 8
        nothing = 0 if small else info.min if dtype.kind == "i" else info.max // 2 + 1
        result = np.where(top, info.max, inside.astype(dtype))
        return np.where(none, nothing, result).astype(dtype)

    return apply(i, convert, [source], target)


def _to_f16(x):
    return x.astype(np.float16).view(np.uint16)


def _selp(i):
    kind = {"f32": "b32", "f64": "b64", "f16": "b16", "bf16": "b16"}.get(i.op[-1], i.op[-1])
    put, condition = writer(i.args[0], kind), reader(i.args[3], "pred")
    a, b = (reader(x, kind) for x in i.args[1:3])
    return lambda crew, mask: put(crew, np.where(condition(crew), a(crew), b(crew)), mask)


def _prmt(i):
    return apply(i, n.pick_bytes, ["b32"] * 3, "b32")


MOVES = {"mov": _mov, "cvt": _cvt, "selp": _selp, "prmt": _prmt}
