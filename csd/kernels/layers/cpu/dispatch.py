"""Loops of a layer that other loops call; the first argument is the number of threads."""

from typing import Any

from numba import types
from numba.extending import overload

from csd.kernels.attention.cpu.attention import _attend
from csd.kernels.layers.cpu.elementwise import _rms_norm, _rotary, _swiglu
from csd.kernels.layers.cpu.linear import multiply as laid_out
from csd.kernels.layers.cpu.unpacked import multiply as as_it_lies

norm, rotary, swiglu, attention = (x.run for x in (_rms_norm, _rotary, _swiglu, _attend))


def product(plain: bool | None, *args: Any) -> None:
    """Product with a plain weight, or with a laid-out one if `plain` is None.

    The type of `plain` decides at compile time, so that the other loop is not compiled.
    """
    raise NotImplementedError("loops call it")


@overload(product, strict=False)
def _choose(plain, *args):
    if isinstance(plain, types.NoneType):
        return lambda plain, *args: laid_out(*args)
    return lambda plain, *args: as_it_lies(*args)
