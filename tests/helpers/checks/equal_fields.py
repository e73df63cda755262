"""Equality of what is made of tensors, field by field."""

from dataclasses import fields

import torch
from helpers.checks.precision import within_eager


def assert_equal_fields(got, want, exact=None, length: int = 1) -> None:
    """Two of one dataclass or named tuple; a failure names the field.

    Tensors are equal in type, shape and values. Where `exact` is given, the same in float64, floats
    are as near to its own as those of `want` are, sums of `length` numbers.
    """
    for name in getattr(want, "_fields", None) or [f.name for f in fields(want)]:
        a, b = getattr(got, name), getattr(want, name)
        if not isinstance(b, torch.Tensor):
            assert a == b, name
        elif exact is not None and b.is_floating_point():
            within_eager(a, b, getattr(exact, name).double(), length)
        else:
            assert a.dtype == b.dtype and torch.equal(a, b), name
