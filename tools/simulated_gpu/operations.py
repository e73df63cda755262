"""Operations of PyTorch and kernels of Triton, queued on the GPU of `simulated.py`."""

import torch
from helpers.checks.host_reads import reads_device
from helpers.checks.nested import leaves_of, mapped
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from simulated_gpu.attention import ATTENTION
from simulated_gpu.clock import Clock
from simulated_gpu.memory import Memory, garbage, storage, whole
from simulated_gpu.streams import Streams
from simulated_gpu.tensor import (
    Simulated,
    cpu_of,
    held_of,
    held_of_each,
    host_like,
    meta_of,
    on_gpu,
)

COPIES = {"copy_", "_to_copy"}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
BY_INDEX = {"index", "index_put_", "_index_put_impl_"}

interpreted = GridExecutor.__call__


def is_view(func) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def writes(func) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def written(func, args, kwargs):
    """Result of an operation that returns its output argument."""
    schema = func._schema
    outs = [
        a
        for a, s in zip(args, schema.arguments, strict=False)
        if s.alias_info is not None and s.alias_info.is_write
    ]
    outs += [
        kwargs[s.name] for s in schema.arguments if s.name in kwargs and s.alias_info is not None
    ]
    if not schema.returns:
        return None
    return outs[0] if len(schema.returns) == 1 else tuple(outs)


def mm_by_rows(x, y):
    """A product in 16 bits adds two halves, rounded each, where it has more than 16 rows."""
    k = x.shape[1] // 2
    if x.dtype.itemsize > 2 or x.shape[0] <= 16 or not k:
        return x @ y
    return x[:, :k] @ y[:k] + x[:, k:] @ y[k:]


def into(out, result):
    return result if out is None else out.copy_(result)


BY_ROWS = {
    "mm": lambda x, y, out=None: into(out, mm_by_rows(x, y)),
    "addmm": lambda bias, x, y, out=None: into(out, bias + mm_by_rows(x, y)),
}


class Operations(Streams, TorchDispatchMode):
    """Decides of each operation whether it is queued, done at once, waited for or refused.

    All arguments are as `Gpu` has them.
    """

    def __init__(self, compiled: bool, idle: bool, memory: int, by_rows: bool, clock: Clock | None):
        super().__init__(clock)
        self.compiled, self.idle, self.memory = compiled, idle, Memory(memory)
        self.by_rows = by_rows
        self._within_launch = False

    # intercepted calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Factories of the device; all else, if it is the device's, comes to `run`."""
        kwargs = kwargs or {}
        asked = kwargs.get("device") is not None or kwargs.get("pin_memory")
        if self._within_launch or not asked:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        mixed = any(isinstance(x, Simulated) for x in leaves_of((args, kwargs)))
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
            if not mixed:
                return self.memory.pin(func(*args, **kwargs))
            made = func(*mapped(meta_of, args), **kwargs | {"device": torch.device("meta")})
            return self.memory.pin(host_like(made))
        device = kwargs.get("device")
        if device is not None and on_gpu(device):
            if name in COPIES:
                return self._copy(func, args, kwargs)
            return self.launch(func, args, kwargs, name=name)
        if mixed and device is not None and name not in COPIES:
            # a factory like a tensor of the device, on the host
            return func(*mapped(cpu_of, args), **kwargs)
        return func(*args, **kwargs)

    def run(self, func, args, kwargs):
        """An operation on at least one tensor of the device."""
        name = func.overloadpacket.__name__
        if name in COPIES:
            return self._copy(func, args, kwargs)
        hargs, hkwargs = mapped(held_of, (args, kwargs))
        if is_view(func):
            return self._own(func(*hargs, **hkwargs))
        leaves = leaves_of((args, kwargs))
        self._one_device(name, leaves)
        if reads_device(func, args):
            self.wait(name)
            return self._own(func(*hargs, **hkwargs))
        if name in ATTENTION:
            return ATTENTION[name](self.launch, name, args, kwargs)
        operator = OPDEFS.get(f"{func.namespace}::{name}")
        if operator is not None and self.host is not None:
            self.host.compile(name, [x for x in leaves if isinstance(x, Simulated)])
        if operator is not None and self.compiled:
            # its results are the device's too
            TorchDispatchMode.__enter__(self)
            try:
                return operator._backend_fns["cuda"](*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        if writes(func) and all(r.alias_info is not None for r in func._schema.returns):
            work = self._work_of(name, func)
            self.push(lambda: work(*hargs, **hkwargs), name, held_of_each(leaves))
            return written(func, args, kwargs)
        return self.launch(func, args, kwargs, name=name)

    def interpret(self, executor, args, kwargs) -> None:
        """A launch of a Triton kernel."""
        leaves = leaves_of((args, kwargs))
        if not any(isinstance(x, Simulated) for x in leaves):
            return interpreted(executor, *args, **kwargs)
        for x in leaves:
            if isinstance(x, torch.Tensor) and not isinstance(x, Simulated):
                raise RuntimeError(f"{executor.fn.__name__} got a tensor of the {x.device}")
        if any(n < 1 for n in executor.grid) or any(n > 65535 for n in executor.grid[1:]):
            raise RuntimeError(f"{executor.fn.__name__} launched with grid {executor.grid}")
        if self.host is not None:
            held = [x for x in leaves if isinstance(x, Simulated)]
            self.host.compile(executor.fn.__name__, held)
        hargs, hkwargs = mapped(held_of, (args, kwargs))
        run = (lambda *a, **k: None) if self.idle else interpreted
        self.push(
            lambda: run(executor, *hargs, **hkwargs), executor.fn.__name__, held_of_each(leaves)
        )

    # its work

    def launch(self, func, args, kwargs, like=None, name=None):
        """Queue one operation. like: tensors of its results' shapes, if meta tensors have none."""
        name = name or func.__name__
        made = self._on_meta(func, args, kwargs) if like is None else like
        result = mapped(lambda x: self._allocate(x) if isinstance(x, torch.Tensor) else x, made)
        if name in EMPTY:
            return result
        targets = held_of_each(leaves_of(result))
        hargs, hkwargs = mapped(held_of, (args, kwargs))
        if "device" in hkwargs:
            hkwargs = hkwargs | {"device": torch.device("cpu")}
        run = self._work_of(name, func)

        def work() -> None:
            got = [x for x in leaves_of(run(*hargs, **hkwargs)) if isinstance(x, torch.Tensor)]
            for target, x in zip(targets, got, strict=True):
                target.copy_(x)

        self.push(work, name, held_of_each(leaves_of((args, kwargs))) + targets)
        return result

    def _work_of(self, name: str, func):
        return BY_ROWS.get(name, func) if self.by_rows else func

    def _on_meta(self, func, args, kwargs):
        """Result of an operation, without values."""
        margs, mkwargs = mapped(meta_of, (args, kwargs))
        if "device" in mkwargs:
            mkwargs = mkwargs | {"device": torch.device("meta")}
        if mkwargs.get("generator") is not None:
            mkwargs = mkwargs | {"generator": None}
        self._within_launch = True
        try:
            return func(*margs, **mkwargs)
        finally:
            self._within_launch = False

    def _allocate(self, like: torch.Tensor) -> Simulated:
        held = host_like(like)
        memory = whole(held)
        garbage(memory)
        if self.capturing is not None:
            self.capturing.given[storage(held)] = memory
        return Simulated(held, self)

    def _own(self, result):
        """Tensors that were made of held ones, as the device's."""
        return mapped(lambda x: Simulated(x, self) if isinstance(x, torch.Tensor) else x, result)

    def _one_device(self, name: str, leaves: list) -> None:
        for x in leaves:
            if not isinstance(x, torch.Tensor) or isinstance(x, Simulated):
                continue
            if not x.dim():
                if name == "where":
                    self.wait("where of a number on the CPU")
            elif name in BY_INDEX:
                # the indices are copied first
                self.wait(f"{name} by indices of the CPU")
            else:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device: {name} got {x.device}"
                )

    def _copy(self, func, args, kwargs):
        """`copy_(target, source, non_blocking)`, or `_to_copy(source)`, which makes its target."""
        if func.overloadpacket.__name__ == "copy_":
            target, source = args[:2]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            self._move(target, source, waits)
            return target
        source = args[0]
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        made = func(meta_of(source), **options)
        if on_gpu(kwargs.get("device") or source.device):
            target = self._allocate(made)
        else:
            target = host_like(made)
            if kwargs.get("pin_memory"):
                self.memory.pin(target)
        self._move(target, source, not kwargs.get("non_blocking"))
        return target

    def _move(self, target, source, waits: bool) -> None:
        to, of = held_of(target), held_of(source)
        inward = isinstance(target, Simulated)
        if inward and isinstance(source, Simulated):
            self.push(lambda: to.copy_(of), "copy_", [to, of])
            return
        self.no_capture("a copy between host and device")
        pinned = self.memory.is_pinned(of if inward else to)
        if inward and not pinned:
            # staged: the host's memory is free when the call returns
            of = of.clone()
        self.push(lambda: to.copy_(of), "copy_", [])
        if waits:
            self.wait("copy_ between host and device")
        elif not inward and not pinned:
            self.wait("copy_ into memory that is not pinned")
        elif not inward:
            garbage(to)
