"""A GPU that is not there: `with Gpu() as gpu:` runs CUDA's path of csd, and finds what would fail.

Tensors say they are on cuda:0 and are computed on the CPU, but late: what is launched waits in its
stream's queue until something waits for it, so that a copy that is read too soon holds nothing yet.
Streams run in the least favourable order that they were not told to avoid. What is captured does
not run; a replay runs all of it again, in memory that holds garbage wherever nobody kept a tensor.
Memory that nothing has written is NaN. An operation on tensors of two devices raises, and so does a
capture that waits for the device, copies from the host, or reads memory that was given back.

`gpu.waits` counts what `torch.cuda.set_sync_debug_mode` would, by operation.
"""

import traceback
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from operators import OPERATORS
from simulated_streams import Event, Graph, Stream, garbage, storage
from simulated_tensor import (
    HostGenerator,
    Simulated,
    cpu_of,
    efficient,
    flash,
    host_first,
    is_view,
    lower_right,
    meta,
    meta_of,
    on_gpu,
    writes,
)
from torch._library.custom_ops import OPDEFS
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from csd.kernels import ops

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal",
         "is_nonzero"}  # fmt: skip
COPIES = {"copy_", "_to_copy"}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ATTENTION = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"}
SYNC = "called a synchronizing CUDA operation"
# what a capture must not do
FORBIDDEN = "operation not permitted when stream is capturing"


class Gpu(TorchDispatchMode):
    """compiled: whether csd's operators launch their Triton kernels (interpreted), or run their
    references as one piece of work each. idle: kernels are launched and do nothing."""

    def __init__(self, compiled: bool = False, idle: bool = False, memory: int = 80 << 30):
        super().__init__()
        self.compiled, self.idle, self.memory = compiled, idle, memory
        self.clock, self.replays, self.events = 0.0, 0, 0
        self.waits: Counter = Counter()
        self.launched: Counter = Counter()
        self.kept: Counter = Counter()
        self._bytes: dict[int, int] = {}
        self.peak = 0
        self.capturing: Graph | None = None
        self.streams: list[Stream] = []
        self.stream = self.default = self._stream()
        self._pinned: dict[int, torch.Tensor] = {}
        self._stack = ExitStack()
        self._within_launch = False
        self.debug = "default"

    # what exists

    def keep(self, made: Simulated) -> None:
        place = storage(made.held)
        self.kept[place] += 1
        self._bytes[place] = made.held.untyped_storage().nbytes()
        self.peak = max(self.peak, self.allocated())
        weakref.finalize(made, self._drop, place)

    def _drop(self, place: int) -> None:
        self.kept[place] -= 1
        if not self.kept[place]:
            del self.kept[place], self._bytes[place]

    def allocated(self) -> int:
        return sum(self._bytes.values())

    def _new(self, meta: torch.Tensor) -> Simulated:
        held = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype)
        garbage(held)
        if self.capturing is not None:
            self.capturing.given[storage(held)] = held
        return Simulated(held, self)

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        self._pinned[storage(x)] = x
        return x

    def is_pinned(self, x: torch.Tensor) -> bool:
        return storage(x) in self._pinned

    def _stream(self, *_, **__) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    # what is told

    def push(self, work, name: str, uses) -> None:
        self.launched[name] += 1
        if self.capturing is None:
            self.stream.push(work)
            return
        graph = self.capturing
        graph.work.append(work)
        graph.names[name] += 1
        for x in uses:
            if storage(x) not in graph.given:
                graph.used[storage(x)] = f"{name}, {tuple(x.shape)} {x.dtype}"

    def no_capture(self, what: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"{FORBIDDEN}: {what}")

    def wait(self, name: str) -> None:
        """The host waits for the current stream, as it does to read a number."""
        self.no_capture(f"{name} waits for the device")
        frames = traceback.extract_stack()
        ours = [f for f in frames if "/csd/" in f.filename or "/bench/" in f.filename]
        at = f" at {ours[-1].filename.rsplit('/', 1)[1]}:{ours[-1].lineno}" if ours else ""
        self.waits[f"{name}{at}"] += 1
        if self.debug == "error":
            raise RuntimeError(SYNC)
        if self.debug == "warn":
            warnings.warn(SYNC, stacklevel=2)
        self.stream.run(self.stream.told)

    def synchronize(self, *_) -> None:
        self.no_capture("the device was waited for")
        # what does not wait for the current stream may be ahead of it
        for stream in [*self.streams[1:], self.default]:
            stream.run(stream.told)

    def launch(self, func, args, kwargs, like=None, name=None):
        """Queue one operation."""
        name = name or getattr(func, "__name__", str(func))
        sims = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Simulated)]
        held = tree_map(lambda x: x.held if isinstance(x, Simulated) else x, (args, kwargs))
        if like is not None:
            found = tree_map(self._new, like)
        else:
            to_meta = lambda x: meta(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
            margs, mkwargs = tree_map(to_meta, (args, kwargs))
            if "device" in mkwargs:
                mkwargs = mkwargs | {"device": torch.device("meta")}
            if mkwargs.get("generator") is not None:
                mkwargs = mkwargs | {"generator": None}
            self._within_launch = True
            try:
                made = func(*margs, **mkwargs)
            finally:
                self._within_launch = False
            found = tree_map(lambda x: self._new(x) if isinstance(x, torch.Tensor) else x, made)
        targets = [x.held for x in tree_leaves(found) if isinstance(x, Simulated)]
        if name in EMPTY:
            return found
        hargs, hkwargs = held
        if "device" in hkwargs:
            hkwargs = hkwargs | {"device": torch.device("cpu")}

        def work() -> None:
            got = [x for x in tree_leaves(func(*hargs, **hkwargs)) if isinstance(x, torch.Tensor)]
            for target, x in zip(targets, got, strict=True):
                target.copy_(x)

        self.push(work, name, [x.held for x in sims] + targets)
        return found

    def run(self, func, args, kwargs):
        """An operation on at least one tensor of the device."""
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        unwrap = lambda x: x.held if isinstance(x, Simulated) else x  # noqa: E731
        if name in COPIES:
            return self._copy(func, args, kwargs)
        if is_view(func):
            found = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
            return tree_map(lambda x: Simulated(x, self), found)
        self._one_device(name, leaves)
        boolean = name.startswith("index") and any(
            x is not None and isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in tree_leaves(args[1])
        )
        if name in READS or boolean:
            self.wait(name)
            found = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
            wrap = lambda x: Simulated(x, self) if isinstance(x, torch.Tensor) else x  # noqa: E731
            return tree_map(wrap, found)
        if name in ATTENTION:
            return self._attention(name, args, kwargs)
        operator = OPDEFS.get(f"{func.namespace}::{name}")
        if operator is not None and self.compiled:
            # what it makes is the device's too
            TorchDispatchMode.__enter__(self)
            try:
                return operator._backend_fns["cuda"](*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        if writes(func) and all(r.alias_info is not None for r in func._schema.returns):
            hargs, hkwargs = tree_map(unwrap, (args, kwargs))
            held = [x.held for x in leaves if isinstance(x, Simulated)]
            self.push(lambda: func(*hargs, **hkwargs), name, held)
            outs = [a for a, s in zip(args, func._schema.arguments, strict=False)
                    if s.alias_info is not None and s.alias_info.is_write]  # fmt: skip
            outs += [kwargs[s.name] for s in func._schema.arguments
                     if s.name in kwargs and s.alias_info is not None]  # fmt: skip
            if not func._schema.returns:
                return None
            return outs[0] if len(func._schema.returns) == 1 else tuple(outs)
        return self.launch(func, args, kwargs, name=name)

    def _attention(self, name: str, args, kwargs):
        q, none = args[0], args[0].new_empty(0)
        if "flash" in name:
            like = [q, q.new_empty(q.shape[:-1], dtype=torch.float32)]
            out, lse = self.launch(flash, args, kwargs, like=like, name=name)
            return out, lse, none, none, q.shape[2], args[1].shape[2], none, none, none
        rows = -(-q.shape[2] // 32) * 32
        like = [q, q.new_empty(*q.shape[:2], rows, dtype=torch.float32)]
        return *self.launch(efficient, args, kwargs, like=like, name=name), none, none

    def _one_device(self, name: str, leaves: list) -> None:
        for x in leaves:
            if isinstance(x, torch.Tensor) and not isinstance(x, Simulated):
                if x.dim():
                    if name in ("index", "index_put_", "_index_put_impl_"):
                        # the indices are copied first
                        self.wait(f"{name} by indices of the CPU")
                        continue
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device: {name} got {x.device}"
                    )
                if name == "where":
                    self.wait("where of a number on the CPU")

    def _copy(self, func, args, kwargs):
        if func.overloadpacket.__name__ == "copy_":
            target, source = args[0], args[1]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            found = target
        else:
            source = args[0]
            waits = not kwargs.get("non_blocking")
            device = kwargs.get("device") or source.device
            options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
            made = func(meta(source), **options)
            if on_gpu(device):
                found = target = self._new(made)
            else:
                found = target = torch.empty_strided(made.size(), made.stride(), dtype=made.dtype)
                if kwargs.get("pin_memory"):
                    self.pin(target)
        to, of = (x.held if isinstance(x, Simulated) else x for x in (target, source))
        if isinstance(target, Simulated) and isinstance(source, Simulated):
            self.push(lambda: to.copy_(of), "copy_", [to, of])
            return found
        host = of if isinstance(target, Simulated) else to
        self.no_capture("a copy between host and device")
        pinned = self.is_pinned(host)
        if not pinned and isinstance(target, Simulated):
            # staged: the host's memory is free when the call returns
            of = of.clone()
        self.push(lambda: to.copy_(of), "copy_", [])
        if waits:
            self.wait("copy_ between host and device")
        elif not pinned and not isinstance(target, Simulated):
            self.wait("copy_ into memory that is not pinned")
        elif not isinstance(target, Simulated):
            garbage(to)
        return found

    # factories

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if self._within_launch:
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
            if not any(isinstance(x, Simulated) for x in leaves):
                return self.pin(func(*args, **kwargs))
            made = func(*tree_map(meta_of, args), **kwargs | {"device": torch.device("meta")})
            return self.pin(torch.empty_strided(made.size(), made.stride(), dtype=made.dtype))
        device = kwargs.get("device")
        if device is not None and on_gpu(device):
            name = func.overloadpacket.__name__
            if name in COPIES:
                return self._copy(func, args, kwargs)
            return self.launch(func, args, kwargs, name=name)
        mixed = any(isinstance(x, Simulated) for x in leaves)
        if mixed and device is not None and func.overloadpacket.__name__ not in COPIES:
            # a factory like a tensor of the device, on the host
            return func(*tree_map(cpu_of, args), **kwargs)
        return func(*args, **kwargs)

    # torch.cuda

    def __enter__(self):
        torch._C._ensureCUDADeviceGuardSet()

        def interpreted(executor, *args, **kwargs):
            return self._interpret(executor, args, kwargs)

        self._executor = GridExecutor.__call__
        cuda = dict(
            _lazy_init=lambda: None,
            is_available=lambda: True,
            current_device=lambda: 0,
            device_count=lambda: 1,
            device=lambda index: nullcontext(),
            device_of=lambda x: nullcontext(),
            get_device_name=lambda *a: "simulated",
            get_device_capability=lambda *a: (9, 0),
            get_device_properties=lambda *a: SimpleNamespace(multi_processor_count=4),
            mem_get_info=lambda *a: (self.memory - self.allocated(), self.memory),
            memory_allocated=lambda *a: self.allocated(),
            memory_reserved=lambda *a: self.allocated(),
            max_memory_allocated=lambda *a: self.peak,
            reset_peak_memory_stats=lambda *a: setattr(self, "peak", self.allocated()),
            empty_cache=lambda: self.launched.update(["empty_cache"]),
            synchronize=self.synchronize,
            set_sync_debug_mode=lambda mode: setattr(self, "debug", mode),
            current_stream=lambda *a: self.stream,
            default_stream=lambda *a: self.default,
            stream=self._within,
            Stream=self._stream,
            Event=lambda **options: Event(self, **options),
            CUDAGraph=lambda *a: Graph(self),
            graph=self._capture,
            graph_pool_handle=lambda: [],
        )
        if not self.compiled:
            operators = replace(OPERATORS, name="triton")
            self._stack.enter_context(mock.patch.object(ops, "triton", lambda: operators))
        for name, value in cuda.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (torch, "Generator", HostGenerator),
            (torch, "tensor", host_first),
            (torch.Tensor, "pin_memory", lambda x: self.pin(x.clone())),
            (GridExecutor, "__call__", interpreted),
            (torch.backends.cuda, "can_use_flash_attention", self._can_use_flash),
            # a tensor of its own kind, which a mode cannot make
            (bias, "causal_lower_right", lower_right),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        return super().__enter__()

    def __exit__(self, *exc):
        try:
            return super().__exit__(*exc)
        finally:
            self._stack.close()

    @staticmethod
    def _can_use_flash(params, debug=False) -> bool:
        return params.query.dtype in (torch.float16, torch.bfloat16)

    def _interpret(self, executor, args, kwargs):
        leaves = tree_leaves((args, kwargs))
        sims = [x for x in leaves if isinstance(x, Simulated)]
        if not sims:
            return self._executor(executor, *args, **kwargs)
        for x in leaves:
            if isinstance(x, torch.Tensor) and not isinstance(x, Simulated):
                raise RuntimeError(f"{executor.fn.__name__} got a tensor of the {x.device}")
        if any(n < 1 for n in executor.grid) or any(n > 65535 for n in executor.grid[1:]):
            raise RuntimeError(f"{executor.fn.__name__} launched with grid {executor.grid}")
        unwrap = lambda x: x.held if isinstance(x, Simulated) else x  # noqa: E731
        hargs, hkwargs = tree_map(unwrap, (args, kwargs))
        run = (lambda *a, **k: None) if self.idle else self._executor
        self.push(
            lambda: run(executor, *hargs, **hkwargs), executor.fn.__name__, [x.held for x in sims]
        )
        return None

    @contextmanager
    def _within(self, stream):
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        self.synchronize()
        with self._within(stream or self._stream()):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None
        pool = [] if pool is None else pool
        pool.append(graph)
        graph.pool = pool
