"""A GPU that is not there: `with Gpu() as gpu:` runs CUDA's path of csd, and finds what would fail.

Tensors report device cuda:0 and are computed on the CPU, but late: what is launched waits in its
stream's queue until something waits for it, so that a copy that is read too soon holds nothing yet.
Streams run in the least favourable order that synchronisation allows. What is captured does
not run; a replay runs all of it again, in memory that holds garbage wherever nobody kept a tensor.
Memory that nothing has written is NaN. An operation on tensors of two devices raises, and so does a
capture that waits for the device, copies from the host, or reads memory that was given back.

`gpu.waits` counts what `torch.cuda.set_sync_debug_mode` would, by operation.
"""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import torch
from helpers.checks.operators import OPERATORS
from torch.nn.attention import bias
from triton.runtime.interpreter import GridExecutor

from csd.engine.resources import model as model_resources
from csd.kernels import backends
from csd.kernels.ops import Ops
from simulated_gpu.attention import lower_right
from simulated_gpu.clock import Clock
from simulated_gpu.operations import Operations
from simulated_gpu.streams import Event, Graph
from simulated_gpu.tensor import HostGenerator, host_first


def can_use_flash(params, debug=False) -> bool:
    return params.query.dtype in (torch.float16, torch.bfloat16)


class Gpu(Operations):
    """compiled: whether csd's operators launch their Triton kernels (interpreted), or run their
    references as one piece of work each. idle: kernels are launched and do nothing. memory: bytes.
    by_rows: whether the last bits of a product in 16 bits depend on its number of rows, as a
    library's do that takes other kernels for other sizes. clock: what the host's time is charged
    with, in place of its own.
    """

    def __init__(
        self,
        compiled: bool = False,
        idle: bool = False,
        memory: int = 80 << 30,
        by_rows: bool = False,
        clock: Clock | None = None,
    ):
        super().__init__(compiled, idle, memory, by_rows, clock)
        self._stack = ExitStack()

    def __enter__(self):
        torch._C._ensureCUDADeviceGuardSet()

        def interpret(executor, *args, **kwargs):
            return self.interpret(executor, args, kwargs)

        memory = self.memory
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
            mem_get_info=lambda *a: (memory.total - memory.allocated(), memory.total),
            memory_allocated=lambda *a: memory.allocated(),
            memory_reserved=lambda *a: memory.allocated(),
            max_memory_allocated=lambda *a: memory.peak,
            reset_peak_memory_stats=lambda *a: memory.reset_peak(),
            empty_cache=lambda: self.launched.update(["empty_cache"]),
            synchronize=self.synchronize,
            set_sync_debug_mode=lambda mode: setattr(self, "sync_debug", mode),
            current_stream=lambda *a: self.stream,
            default_stream=lambda *a: self.default,
            stream=self.within,
            Stream=self.new_stream,
            Event=lambda **options: Event(self, **options),
            CUDAGraph=lambda *a: Graph(self),
            graph=self.capture,
            graph_pool_handle=lambda: [],
        )
        if not self.compiled:
            # the public operators, with the properties of the backend that they stand for
            kernels = backends.triton()
            names = ["name", "exact", *(f.name for f in fields(Ops) if f.type is bool)]
            operators = replace(OPERATORS, **{name: getattr(kernels, name) for name in names})
            self._stack.enter_context(mock.patch.object(backends, "triton", lambda: operators))
        for name, value in cuda.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (torch, "Generator", HostGenerator),
            (torch, "tensor", host_first),
            (torch.Tensor, "pin_memory", lambda x: memory.pin(x.clone())),
            (GridExecutor, "__call__", interpret),
            (torch.backends.cuda, "can_use_flash_attention", can_use_flash),
            # a tensor of its own kind, which a mode cannot make
            (bias, "causal_lower_right", lower_right),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, value))
        if self.host is not None:
            host = self.host

            def checked(*args) -> None:
                host.charge("checks", host.check)

            self._stack.enter_context(mock.patch.object(model_resources, "require_check", checked))
            self._stack.enter_context(mock.patch.object(time, "perf_counter", lambda: host.now))
        return super().__enter__()

    def __exit__(self, *exc):
        try:
            return super().__exit__(*exc)
        finally:
            self._stack.close()
