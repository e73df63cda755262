"""An instruction as a function of the registers that it names."""

import numpy as np

from . import arithmetic as n
from .registers import reader, writer
from .text import Instruction


def apply(i: Instruction, function, sources: list[str], target: str):
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
        result = function(*wide)
        return n.to_bf16(result) if target == "bf16" else result

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
