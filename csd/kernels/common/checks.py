"""Checks of the tensors that public functions are called with; none reads a device's memory.

Kernels read memory by the shape and layout that they expect. A tensor of another shape, dtype,
device or layout would not fail there but give wrong numbers, so each is an error that names the
argument, the expected value and the given one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch

from csd.state.slots import MAX_STOP_IDS, Slots
from csd.state.verdict import TOP

INT, LONG, FLOAT = torch.int32, torch.int64, torch.float32

# letters of shapes in `Slots` -> dimensions
_SLOTS: dict[str, str | int] = {"W": "words", "I": MAX_STOP_IDS}


def _dims(shape: str) -> tuple[str | int, ...]:
    return tuple(_SLOTS.get(letter, letter) for letter in shape)


# fields of a step's records that operations take: a letter or number per dimension, and the dtype
# (None: any floating-point one)
FIELDS: dict[str, dict[str, tuple[tuple[str | int, ...], torch.dtype | None]]] = {
    "pool": {
        **dict.fromkeys(("token", "parent", "slot", "depth", "cost", "source"), (("M",), INT)),
        "position": (("M",), INT),
        "ancestors": (("M",), LONG),
        "context": (("M", "N"), INT),
        "slot_start": (("S",), INT),
        "slot_nodes": (("S",), INT),
    },
    "slots": {f.name: (_dims(f.metadata["shape"]), f.metadata["dtype"]) for f in fields(Slots)},
    "verdict": {
        **dict.fromkeys(("logprob", "raw_logprob"), (("M",), None)),
        **dict.fromkeys(("accept_count", "finish"), (("S",), INT)),
        "sample": (("M",), INT),
        "top_token": (("M", TOP), INT),
        "top_prob": (("M", TOP), FLOAT),
        "accept_row": (("S", "A"), INT),
        "bad": (("S",), torch.bool),
    },
    "table": {
        **dict.fromkeys(("entry_group", "entry_hash"), (("C",), LONG)),
        "entry_tokens": (("C", "N"), INT),
        **dict.fromkeys(("entry_total", "entry_stamp"), (("C",), INT)),
        **dict.fromkeys(("succ_token", "succ_weight"), (("C", "E"), INT)),
        "succ_source": (("C", "E"), LONG),
        "step": ((1,), INT),
        "dropped": ((1,), LONG),
    },
    "layout": {
        "prompt_pages": (("G", "PP"), INT),
        "prompt_len": (("G",), INT),
        "slot_pages": (("S", "SP"), INT),
        "slot_len": (("S",), INT),
        "slot": (("M",), INT),
        "ancestors": (("M",), LONG),
        **dict.fromkeys(("slot_start", "slot_nodes"), (("S",), INT)),
        "group_start": (("G + 1",), INT),
    },
    "packed": dict.fromkeys(("end", "position"), (("R",), INT)),
    "texts": {
        "group_key": (("R",), LONG),
        **dict.fromkeys(("sample", "length"), (("R",), INT)),
        **dict.fromkeys(("token", "chance"), (("R", "W"), INT)),
    },
    "candidates": dict.fromkeys(("token", "chance"), (("S", "P", "L"), INT)),
}


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | None,
    device: torch.device,
    rows_apart: bool = False,
    any_layout: bool = False,
) -> None:
    """Raises ValueError unless `x` has this shape, dtype, device and layout.

    None in `shape` allows any size, None as `dtype` any floating-point dtype. x must be contiguous;
    with rows_apart only x[0] must be, with any_layout neither.
    """
    actual = x.shape
    # a single comparison in the usual case of equal shapes
    if actual != shape and (
        len(actual) != len(shape)
        or any(n is not None and n != m for n, m in zip(shape, actual, strict=True))
    ):
        sizes = ", ".join("*" if n is None else str(n) for n in shape)
        sizes += "," * (len(shape) == 1)
        raise ValueError(f"{name} must have shape ({sizes}), got {tuple(actual)}")
    if dtype is None and not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    # slicing is slow, and x is contiguous in most calls, so that is tested first
    if any_layout or x.is_contiguous() or (rows_apart and x[:1].is_contiguous()):
        return
    what = f"rows of {name}" if rows_apart else name
    raise ValueError(f"{what} must be contiguous, got strides {x.stride()}")


def check_fields(
    kind: str,
    record: Any,
    names: Iterable[str],
    sizes: dict[str, int],
    device: torch.device,
    prefix: str | None = None,
) -> None:
    """Checks a record's fields with `check_tensor`.

    kind: a key of FIELDS, and by default the prefix of names in errors. sizes: size by dimension
    letter; a missing letter is added in place from the first field that has it.
    """
    prefix = f"{kind}." if prefix is None else prefix
    for name in names:
        x = getattr(record, name)
        dims, dtype = FIELDS[kind][name]
        if x.dim() == len(dims):
            for d, n in zip(dims, x.shape, strict=True):
                if isinstance(d, str) and "+" not in d:
                    sizes.setdefault(d, n)
        shape = [_size(d, sizes) for d in dims]
        check_tensor(f"{prefix}{name}", x, shape, dtype, device)


def _size(dim: str | int, sizes: dict[str, int]) -> int | None:
    """Size of a dimension such as "S", "G + 1" or 8; None while it is not known."""
    if isinstance(dim, int):
        return dim
    letter, _, more = dim.partition(" + ")
    return sizes[letter] + int(more or 0) if letter in sizes else None
