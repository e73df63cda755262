"""CUDA graphs that share one stream and one memory pool."""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from csd.state.preparation_phases import phase

T = TypeVar("T")
# torch.cuda.graph first waits for the whole device, which would end the capture of another thread,
# and torch has one flag for the captures of a process
CAPTURING = threading.RLock()


@dataclass(slots=True)
class Captures:
    """CUDA graphs that never run concurrently, and so share their allocations."""

    stream: Any = None
    warming: Any = None
    memory: Any = None
    graphs: dict = field(default_factory=dict)  # key -> (graph, result of the captured function)

    def get(self, key: Any, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Return the graph of `run` and its result, captured at the first use of `key`.

        `run` is called twice before the capture, to compile every kernel and create every handle.
        Captures of other engines in other threads wait meanwhile.
        """
        if key not in self.graphs:
            with CAPTURING:
                self.graphs[key] = self._capture(run)
        return self.graphs[key]

    def _capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        # graphs share memory if they are captured on the same stream
        self.stream = self.stream or torch.cuda.Stream()
        self.memory = self.memory or torch.cuda.graph_pool_handle()
        # cuBLAS has a workspace per stream. After a warm-up on the capture stream, it would lie in
        # ordinary memory, which others in the process may free and reuse while graphs need it
        self.warming = self.warming or torch.cuda.Stream()
        self.warming.wait_stream(torch.cuda.current_stream())
        on_gpu = torch.device("cuda")
        with phase("compile a step's kernels", on_gpu, kind="compile"):
            with torch.cuda.stream(self.warming):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(self.warming)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # if the garbage collector freed a kernel meanwhile, the capture would fail
        collecting = gc.isenabled()
        gc.disable()
        try:
            # other threads may continue to use the device, except for waiting for all of it and
            # drawing from torch's default generator
            options = dict(pool=self.memory, stream=self.stream, capture_error_mode="thread_local")
            with (
                phase("capture a step", on_gpu, kind="compile"),
                torch.cuda.graph(graph, **options),
            ):
                result = run()
        finally:
            if collecting:
                gc.enable()
        return graph, result
