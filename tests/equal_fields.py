"""Equality of what is made of tensors, field by field."""

from dataclasses import fields

import torch


def assert_equal_fields(got, want, atol: float = 0.0) -> None:
    """Two of one dataclass or named tuple; a failure names the field.

    Tensors are equal in type, shape and values; those of floats up to `atol`, where that is given.
    """
    for name in getattr(want, "_fields", None) or [f.name for f in fields(want)]:
        a, b = getattr(got, name), getattr(want, name)
        if not isinstance(b, torch.Tensor):
            assert a == b, name
        elif atol and b.is_floating_point():
            torch.testing.assert_close(
                a, b, rtol=0, atol=atol, msg=lambda said, name=name: f"{name}: {said}"
            )
        else:
            assert a.dtype == b.dtype and torch.equal(a, b), name
