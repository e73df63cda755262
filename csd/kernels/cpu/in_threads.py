"""The loops of a layer for other loops, each in one thread or in several.

many: whether in several; None in a process of one thread. numba leaves out what an argument of
that type does not reach, so that such a process does not compile what several threads run.
"""

from csd.kernels.cpu.attention import _attend
from csd.kernels.cpu.layers import _rms_norm, _rotary, _swiglu
from csd.kernels.cpu.numbers import loop
from csd.kernels.cpu.plain import _product as _plain
from csd.kernels.cpu.products import _product

# loops call loops by names of their module
norm_alone, norm_together = _rms_norm.alone, _rms_norm.together
product_alone, product_together = _product.alone, _product.together
plain_alone, plain_together = _plain.alone, _plain.together
rotary_alone, rotary_together = _rotary.alone, _rotary.together
attend_alone, attend_together = _attend.alone, _attend.together
swiglu_alone, swiglu_together = _swiglu.alone, _swiglu.together


@loop
def norm(many, *args):
    if many is None:
        norm_alone(*args)
    elif many:
        norm_together(*args)
    else:
        norm_alone(*args)


@loop
def rotary(many, *args):
    if many is None:
        rotary_alone(*args)
    elif many:
        rotary_together(*args)
    else:
        rotary_alone(*args)


@loop
def attention(many, *args):
    if many is None:
        attend_alone(*args)
    elif many:
        attend_together(*args)
    else:
        attend_alone(*args)


@loop
def swiglu(many, *args):
    if many is None:
        swiglu_alone(*args)
    elif many:
        swiglu_together(*args)
    else:
        swiglu_alone(*args)


@loop
def product(many, shape, x, weight, bias, y, plain, how):
    turned, like, by = how
    if plain is None:
        _laid_out(many, shape, x, turned, weight, bias, y, like, by)
    else:
        _as_it_lies(many, shape, x, turned, weight, bias, y, like, by)


@loop
def _laid_out(many, *args):
    if many is None:
        product_alone(*args)
    elif many:
        product_together(*args)
    else:
        product_alone(*args)


@loop
def _as_it_lies(many, *args):
    if many is None:
        plain_alone(*args)
    elif many:
        plain_together(*args)
    else:
        plain_alone(*args)
