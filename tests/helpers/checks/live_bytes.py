"""The bytes of tensors that are alive at once."""

from contextlib import contextmanager

import torch
from helpers.checks.nested import leaves_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts what operations within it allocate, less what is dropped; `peak` is the most."""

    def __init__(self):
        super().__init__()
        self.peak, self.paused, self._alive = 0, False, {}

    @contextmanager
    def pause(self):
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in leaves_of((args, kwargs)) if of_torch(x)}
        found = func(*args, **(kwargs or {}))
        if not self.paused:
            for x in leaves_of((found,)):
                if of_torch(x) and x.untyped_storage()._cdata not in before:
                    storage = x.untyped_storage()
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found


def of_torch(x):
    return isinstance(x, torch.Tensor)
