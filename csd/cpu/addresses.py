"""Addresses of tensors by name, in the form in which loops take them.

A loop's argument is a namedtuple of addresses, so that a wrong field name is an error and does not
select another tensor. Making numpy arrays of as many tensors takes longer than a step's
verification.
"""

from collections.abc import Mapping
from typing import Any

import torch

from csd.cpu.tensor_access import on_host


def addresses(
    kind: type, record: Any, dtypes: Mapping[str, torch.dtype] | torch.dtype
) -> Any | None:
    """Returns the addresses of a record's tensors as `kind`, a namedtuple with their names.

    dtypes: expected dtypes by field, or one for all. Returns None if a tensor has another dtype, is
    not contiguous or is not in the CPU's memory.
    """
    found = []
    for name in kind._fields:  # type: ignore[attr-defined]
        x = getattr(record, name)
        wanted = dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]
        if x.dtype is not wanted or not x.is_contiguous() or not on_host(x):
            return None
        found.append(x.data_ptr())
    return kind(*found)
