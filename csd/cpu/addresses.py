"""Addresses of tensors by name, as loops are given them.

A loop's argument is a namedtuple of addresses, so that a wrong field is an error and no other
tensor. numpy's arrays of as many tensors take longer to make than a step's verification.
"""

from collections.abc import Mapping
from typing import Any

import torch

from csd.cpu.numbers import on_host


def addresses(
    kind: type, record: Any, dtypes: Mapping[str, torch.dtype] | torch.dtype
) -> Any | None:
    """`kind` of the addresses of a record's tensors, the fields of `kind`, a namedtuple.

    dtypes: by field, or one for all. None where a tensor has another one or is not contiguous.
    """
    found = []
    for name in kind._fields:  # type: ignore[attr-defined]
        x = getattr(record, name)
        wanted = dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]
        if x.dtype is not wanted or not x.is_contiguous() or not on_host(x):
            return None
        found.append(x.data_ptr())
    return kind(*found)
