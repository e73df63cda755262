"""Tensors of the GPU of `simulated.py`, and their likes on the host and without values."""

import torch
import torch.nn.functional as F
from helpers.checks.nested import leaves_of

CUDA = torch.device("cuda", 0)
# exclusive-or with a GPU generator's seed
OTHER_NUMBERS = 0x5EED


class Simulated(torch.Tensor):
    """`held` has what the device has of it, as soon as its stream has run so far.

    To C++ it is a meta tensor: a build without CUDA has no guard for its devices.
    """

    held: torch.Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held, gpu):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held, made.gpu = held, gpu
        gpu.memory.keep(made)
        return made

    def get_device(self):
        return 0

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, force=False):
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.cpu().numpy()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            # chooses a backend by the device in C++
            return args[0].gpu.launch(func, args, kwargs or {}, like=args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        gpu = next(x.gpu for x in leaves_of((args, kwargs)) if isinstance(x, Simulated))
        return gpu.run(func, args, kwargs or {})

    def __repr__(self):
        return f"Simulated({tuple(self.shape)}, {self.dtype})"


def on_gpu(device) -> bool:
    # C++ overrides the device
    return torch.device(device).type in ("cuda", "meta")


def held_of(x):
    return x.held if isinstance(x, Simulated) else x


def held_of_each(leaves) -> list[torch.Tensor]:
    return [x.held for x in leaves if isinstance(x, Simulated)]


def host_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)


def meta_of(x):
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def cpu_of(x):
    return host_like(x) if isinstance(x, Simulated) else x


class HostGenerator(torch.Generator):
    """Random numbers are drawn on the host; a GPU's differ from a CPU's of the same seed."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.of_gpu = on_gpu(device)
        return made.manual_seed(made.initial_seed())

    def manual_seed(self, seed):
        return super().manual_seed(seed ^ OTHER_NUMBERS if self.of_gpu else seed)


_made = torch.tensor


def host_first(data, *, device=None, **options):
    """`torch.tensor` makes it on the host, and hides the copy from modes."""
    made = _made(data, **options)
    return made.to(CUDA) if device is not None and on_gpu(device) else made
