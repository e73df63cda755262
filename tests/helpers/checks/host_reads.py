"""Operations that read a tensor on the host, which waits for its device."""

import torch
from helpers.checks.nested import leaves_of
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "is_nonzero",
}


def reads_device(func, args) -> bool:
    """True if `func` on `args` returns a number of the host, or a shape that depends on values."""
    name = func.overloadpacket.__name__
    by_mask = name.startswith("index") and any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)
        for x in leaves_of(args[1])
    )
    return name in READS or by_mask


class NoHostReads(TorchDispatchMode):
    """Rejects them. `seen` has the name of every operation that passed."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if reads_device(func, args):
            raise AssertionError(f"{func} reads the device")
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
