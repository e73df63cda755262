"""Memory of the GPU of `simulated.py`: who keeps it, and what it holds before it is written."""

import weakref
from collections import Counter

import torch


def storage(x: torch.Tensor) -> int:
    """Address of a tensor's storage; views of one storage have the same."""
    return x.untyped_storage().data_ptr()


def whole(x: torch.Tensor) -> torch.Tensor:
    """All of the memory that `x` is a view of."""
    return x.new_empty(0).set_(x.untyped_storage())


def garbage(x: torch.Tensor) -> None:
    """Fill `x`, and not its neighbours, with a pattern of unwritten memory."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        x.fill_(True)
    else:
        x.fill_(-77)


class Memory:
    """`total` bytes on the device, and what is pinned on the host."""

    def __init__(self, total: int):
        self.total, self.peak = total, 0
        self._tensors: Counter = Counter()
        self._bytes: dict[int, int] = {}
        self._pinned: dict[int, torch.Tensor] = {}

    def keep(self, made) -> None:
        """A tensor of the device exists, until Python lets go of it."""
        place = storage(made.held)
        self._tensors[place] += 1
        self._bytes[place] = made.held.untyped_storage().nbytes()
        self.peak = max(self.peak, self.allocated())
        weakref.finalize(made, self._drop, place)

    def _drop(self, place: int) -> None:
        self._tensors[place] -= 1
        if not self._tensors[place]:
            del self._tensors[place], self._bytes[place]

    def is_kept(self, place: int) -> bool:
        return place in self._tensors

    def allocated(self) -> int:
        return sum(self._bytes.values())

    def reset_peak(self) -> None:
        self.peak = self.allocated()

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        self._pinned[storage(x)] = x
        return x

    def is_pinned(self, x: torch.Tensor) -> bool:
        return storage(x) in self._pinned
