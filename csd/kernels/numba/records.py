"""Arrays of a record in a loop, made of the addresses and the declarations of its view."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from numba.extending import register_jitable

from csd.kernels.numba.tensors import memory
from csd.state.record import View

_LETTERS = "M S G N T A C E V words"
# sizes by dimension, as records of `csd.state` declare them, and the vocabulary's, V. A loop gives
# those of all its records: nothing checks the others, which are -1
Sizes: Any = namedtuple("Sizes", _LETTERS, defaults=(-1,) * len(_LETTERS.split()))


def opener(view: View) -> Callable:
    """Returns the function by which a loop opens `view.addresses(record)` as arrays, `view.kind`.

    Its arguments are the addresses, `Sizes`, and an array whose dtype is that of fields with any
    floating-point one. Its source follows from the declarations: numba compiles no loop over fields
    of several types.
    """
    names: dict[str, Any] = {"__name__": __name__, "memory": memory, "kind": view.kind}
    arrays = []
    for name, (dims, dtype, _) in view.fields.items():
        like = "floats"
        if dtype is not None:
            like = str(dtype).removeprefix("torch.")
            names[like] = torch.empty(0, dtype=dtype).numpy()
        shape = "".join(f"{d}, " if isinstance(d, int) else f"sizes.{d}, " for d in dims)
        arrays.append(f"memory(addresses.{name}, ({shape}), {like})")
    code = f"def opened(addresses, sizes, floats=None): return kind({', '.join(arrays)})"
    exec(compile(code, __file__, "exec"), names)
    return register_jitable(names["opened"])
