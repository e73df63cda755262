"""Access of numba's loops to tensors: their memory and their dtypes.

numba has no bfloat16. Its bits are the upper half of a float32's bits, so loops read bfloat16
tensors as uint16, and round to the nearest, ties to even, as PyTorch does.

A loop that reads many tensors takes a namedtuple of addresses (`csd.state.record.View`) and opens
it as arrays itself (`csd.kernels.numba.records`): making numpy arrays of as many tensors takes
longer than a step's verification.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic, overload, register_jitable

from csd.state.record import PLAIN

# for each dtype that loops read, an empty array of the type by which they read it
LIKE = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}


def readable(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """True if loops read all tensors: in the CPU's memory, of one dtype of `LIKE`."""
    tensors = (x, *(y for y in others if y is not None))
    return x.dtype in LIKE and all(
        y.dtype == x.dtype and type(y) in PLAIN and y.is_cpu for y in tensors
    )


def require(served: bool, name: str, *tensors: torch.Tensor | None) -> None:
    """Raises TypeError, which describes the tensors of operation `name`, unless `served`."""
    if not served:
        description = ", ".join(_described(x) for x in tensors if x is not None)
        raise TypeError(
            f"{name} with kernels='cpu' takes CPU tensors of one dtype: bfloat16, float32, or, "
            f"except for norms, rotary embedding and SwiGLU, float64; got {description}"
        )


def _described(x: torch.Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    kind = "" if type(x) in PLAIN else f" {type(x).__name__}"
    return f"{dtype}{kind} {tuple(x.shape)} with strides {x.stride()} on {x.device}"


@register_jitable
def memory(address, shape, like):
    """The array at an address, with a shape and the dtype of the array `like`.

    Loops take addresses, because making a numpy array of a tensor takes longer than a row's norm.
    """
    return carray(_pointer(address, like), shape)


@intrinsic
def _pointer(typing_context, address, like):
    kind = types.CPointer(like.dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.intp, like), generate


def read(x: Any) -> Any:
    """An array's element as a number: bits of bfloat16 as float32, other elements unchanged."""


def rounded(value: Any, like: Any) -> Any:
    """`value` rounded to the element type of the array `like`; bfloat16 as its bits in uint16."""


@overload(read)
def _read(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@overload(rounded)
def _rounded(value, like):
    if like.dtype == types.float64:
        return lambda value, like: np.float64(value)
    if like.dtype == types.float32:
        return lambda value, like: np.float32(value)

    def bfloat16(value, like):
        bits = np.float32(value).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        up = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        return np.uint16(up) if value == value else np.uint16(0x7FC0)

    return bfloat16
