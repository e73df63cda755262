"""Shapes in Triton's interpreter, made once, which it makes and compares with every type.

Most of an interpreted kernel's time goes there. Nothing here touches a value.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# the least and the largest integer of a type
LIMITS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
LIMITS |= {f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Shape:
    """Common part of types and tensors of one shape."""

    of_type: core.tuple
    of_tensor: core.tuple  # the sizes as constexpr
    numel: tl.constexpr


@cache
def shape_of(sizes: tuple) -> Shape:
    constexprs = core.tuple([tl.constexpr(n) for n in sizes])
    return Shape(core.tuple(sizes), constexprs, tl.constexpr(math.prod(sizes)))


def patch() -> None:
    patch_overflow_checks()
    patch_numpy_types()
    patch_block_types()
    patch_tensors()
    patch_broadcasts()
    patch_operands()


def patch_overflow_checks() -> None:
    """Every sum, difference and product of integers is computed again in int64, for an assertion.

    The interpreter then drops it, since its assertions are on only in debugging.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def patch_numpy_types() -> None:
    """A lookup makes a table of all types."""
    slow, by_name = interpreter._get_np_dtype, {}

    def numpy_type(ty):
        ty = ty.scalar
        if isinstance(ty, tl.pointer_type):
            return np.dtype(np.uint64)
        if ty.name not in by_name:
            by_name[ty.name] = slow(ty)
        return by_name[ty.name]

    interpreter._get_np_dtype = numpy_type


def patch_block_types() -> None:
    """A shape is checked once, and all types of it share what follows from it."""
    slow = tl.block_type.__init__
    known: dict[tuple, Shape] = {}
    same: dict[int, Shape] = {}  # by the identity of what other types of it have, which stays

    def init(self, element_ty, shape):
        self.made = same.get(id(shape))
        if self.made is None:
            sizes = tuple([core._unwrap_if_constexpr(n) for n in shape])
            if sizes not in known:
                # which refuses shapes that no block has
                slow(self, element_ty, shape)
                made = known[sizes] = shape_of(sizes)
                same[id(made.of_type)] = made
            self.made = known[sizes]
        self.element_ty = element_ty
        self.shape, self.numel = self.made.of_type, self.made.numel.value

    tl.block_type.__init__ = init
    # few are printed
    name = cached_property(lambda ty: f"<{ty.shape}, {ty.element_ty}>")
    name.__set_name__(tl.block_type, "name")
    tl.block_type.name = name


def patch_tensors() -> None:
    scalar = shape_of(())

    def init(self, handle, type):
        shape = type.made if type.is_block() else scalar
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape.of_tensor, shape.numel

    tl.tensor.__init__ = init


def patch_broadcasts() -> None:
    """Operands of one shape need none."""
    slow = TritonSemantic.broadcast_impl_value

    def broadcast(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() == b.is_block() and (not a.is_block() or a.made is b.made):
            return lhs, rhs
        return slow(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast


def patch_operands() -> None:
    """Operands of one type need no cast, and neither does a number that fits the other's type."""
    slow = TritonSemantic.binary_op_type_checking_impl

    def check(self, lhs, rhs, *flags):
        # divisions have all four flags
        if len(flags) < 4 and isinstance(lhs, tl.tensor) and not lhs.dtype.is_ptr():
            if isinstance(rhs, tl.tensor):
                if lhs.dtype is rhs.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) is int and lhs.dtype.name in LIMITS:
                least, most = LIMITS[lhs.dtype.name]
                if least <= rhs <= most:
                    return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        return slow(self, lhs, rhs, *flags)

    TritonSemantic.binary_op_type_checking_impl = check
