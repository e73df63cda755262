"""Loops of a layer that other loops call, each in one thread or in several."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import overload

from csd.kernels.attention.cpu.attention import _attend
from csd.kernels.layers.cpu.elementwise import _rms_norm, _rotary, _swiglu
from csd.kernels.layers.cpu.linear import _product
from csd.kernels.layers.cpu.unpacked import _product as _plain
from csd.kernels.numba.threads import ByThreads


def either(loops: ByThreads) -> Callable:
    """A function that runs `loops.together` if its first argument, `many`, is true, else `alone`.

    many: None in a process of one thread, so that the loop of several threads is not compiled.
    """
    alone, together = loops.alone, loops.together

    def run(many: bool | None, *args: Any) -> None:
        raise NotImplementedError("loops call it")

    @overload(run, strict=False)
    def choose(many, *args):
        if isinstance(many, types.NoneType):
            return lambda many, *args: alone(*args)
        return lambda many, *args: together(*args) if many else alone(*args)

    return run


norm_alone = _rms_norm.alone
norm, rotary, swiglu = either(_rms_norm), either(_rotary), either(_swiglu)
attention, laid_out, as_it_lies = either(_attend), either(_product), either(_plain)


def product(plain: bool | None, many: bool | None, *args: Any) -> None:
    """Product with a plain weight, or with a laid-out one if `plain` is None.

    The type of `plain` decides at compile time, so that the other loop is not compiled.
    """
    raise NotImplementedError("loops call it")


@overload(product, strict=False)
def _choose(plain, many, *args):
    if isinstance(plain, types.NoneType):
        return lambda plain, many, *args: laid_out(many, *args)
    return lambda plain, many, *args: as_it_lies(many, *args)
