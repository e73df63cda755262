"""Tensors of the GPU of `simulated.py`, and what its attention computes."""

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)


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
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device="meta",
        )  # fmt: skip
        made.held, made.gpu = held, gpu
        gpu.keep(made)
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
        gpu = next(x.gpu for x in tree_leaves((args, kwargs)) if isinstance(x, Simulated))
        return gpu.run(func, args, kwargs or {})

    def __repr__(self):
        return f"Simulated({tuple(self.shape)}, {self.dtype})"


def on_gpu(device) -> bool:
    # C++ takes over the device that it knows
    return torch.device(device).type in ("cuda", "meta")


def is_view(func) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def writes(func) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def meta_of(x):
    return meta(x) if isinstance(x, torch.Tensor) else x


def cpu_of(x):
    if not isinstance(x, Simulated):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)


def attend(q, k, v, mask, scale):
    """[B, H, R, D] and log-sum-exps [B, H, R] in float32; keys may have fewer heads."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + mask
    return (score.softmax(-1) @ v).to(q.dtype), score.logsumexp(-1)


def flash(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Its causal mask ends where queries and keys do."""
    mask = torch.zeros(q.shape[2], k.shape[2])
    if is_causal:
        mask.masked_fill_(~lower_right(*mask.shape), float("-inf"))
    return attend(q, k, v, mask, scale)


def efficient(q, k, v, bias, compute_log_sumexp, *, scale=None):
    out, lse = attend(q, k, v, bias.float(), scale)
    return out, F.pad(lse, (0, -q.shape[2] % 32))


def lower_right(rows: int, end: int) -> torch.Tensor:
    return torch.ones(rows, end, dtype=torch.bool).tril(end - rows)


class HostGenerator(torch.Generator):
    """Random numbers are drawn on the host, whatever the device."""

    def __new__(cls, device=None):
        return super().__new__(cls)


_made = torch.tensor


def host_first(data, *, device=None, **options):
    """`torch.tensor` makes it on the host, and hides the copy from modes."""
    made = _made(data, **options)
    return made.to(CUDA) if device is not None and on_gpu(device) else made
