"""Streams, events and graphs of the GPU of `simulated.py`: queued work and its execution."""

import sys
import traceback
import warnings
from collections import Counter, deque
from contextlib import contextmanager

import torch

from simulated_gpu.clock import Clock
from simulated_gpu.memory import garbage, storage

SYNC = "called a synchronizing CUDA operation"
# error of an operation that a capture must not do
FORBIDDEN = "operation not permitted when stream is capturing"


class Stream:
    def __init__(self, gpu):
        self._gpu, self.queue, self.done, self.queued = gpu, deque(), 0, 0

    def push(self, work) -> None:
        self.queued += 1
        self.queue.append(work)

    def run(self, until: int) -> None:
        """Run the stream's work up to item `until`."""
        # remaining work is the host's and never queued on the GPU
        with torch._C._DisableTorchDispatch():
            while self.done < until:
                self.done += 1
                self.queue.popleft()()

    def record_event(self, event=None):
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event) -> None:
        stream, place = event.stream, event.place
        if stream is not None and stream is not self:
            self.push(lambda: stream.run(place))

    def wait_stream(self, other) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._gpu.no_capture("a stream was waited for")
        self.run(self.queued)


class Event:
    def __init__(self, gpu, enable_timing=False, **_):
        self._gpu, self._timing = gpu, enable_timing
        self.stream, self.place, self.time = None, 0, None

    def record(self, stream=None) -> None:
        self._gpu.no_capture("an event was recorded")
        self.stream = stream or self._gpu.stream
        self.stream.push(self._pass)
        self.place, self.time = self.stream.queued, None

    def _pass(self) -> None:
        self.time = self._gpu.clock

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        self._gpu.no_capture("an event was waited for")
        self._gpu.events += 1
        self.stream.run(self.place)
        # work that nothing waits for goes on meanwhile
        for stream in self._gpu.streams:
            if stream is not self.stream and stream.queue:
                stream.run(stream.done + 1)

    def elapsed_time(self, end) -> float:
        if not (self._timing and end._timing):
            raise RuntimeError("events without timing have no time")
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return end.time - self.time


class Graph:
    """Captured work, the memory allocated for it, and other memory it uses."""

    def __init__(self, gpu):
        self._gpu, self.work, self.given, self.used, self.pool = gpu, [], {}, {}, None
        self.names: Counter = Counter()

    def replay(self) -> None:
        gpu = self._gpu
        if self.pool is None:
            raise RuntimeError("a graph was replayed that holds no capture")
        for place, what in self.used.items():
            if not gpu.memory.is_kept(place):
                raise RuntimeError(f"a graph uses memory that was given back: {what}")
        # graphs of one pool use each other's memory where nobody has kept it
        free = [x for g in self.pool for p, x in g.given.items() if not gpu.memory.is_kept(p)]

        def run() -> None:
            for x in free:
                garbage(x)
            for work in self.work:
                gpu.clock += 0.001
                work()

        gpu.replays += 1
        if gpu.host is not None:
            gpu.host.charge("launches", gpu.host.launch)
        gpu.stream.push(run)


class Streams:
    """Commands of the host to the device: streams, captures and waits."""

    def __init__(self, host: Clock | None):
        super().__init__()
        self.host = host
        self.clock, self.replays, self.events = 0.0, 0, 0
        self.waits: Counter = Counter()
        self.launched: Counter = Counter()
        self.capturing: Graph | None = None
        self.streams: list[Stream] = []
        self.stream = self.default = self.new_stream()
        self.sync_debug = "default"

    def new_stream(self, *_, **__) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def push(self, work, name: str, uses) -> None:
        self.launched[name] += 1
        if self.host is not None:
            self.host.charge("launches", self.host.launch)
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
        frames = traceback.walk_stack(sys._getframe())
        places = ((frame.f_code.co_filename, line) for frame, line in frames)
        ours = ((path, line) for path, line in places if "/csd/" in path or "/bench/" in path)
        path, line = next(ours, ("", 0))
        at = f" at {path.rsplit('/', 1)[1]}:{line}" if path else ""
        self.waits[f"{name}{at}"] += 1
        if self.sync_debug == "error":
            raise RuntimeError(SYNC)
        if self.sync_debug == "warn":
            warnings.warn(SYNC, stacklevel=2)
        self.stream.run(self.stream.queued)

    def synchronize(self, *_) -> None:
        self.no_capture("the device was waited for")
        # work that does not wait for the current stream may be ahead of it
        for stream in [*self.streams[1:], self.default]:
            stream.run(stream.queued)

    @contextmanager
    def within(self, stream):
        """`torch.cuda.stream`"""
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        """`torch.cuda.graph`"""
        if self.host is not None:
            self.host.charge("captures", self.host.capture)
        self.synchronize()
        with self.within(stream or self.new_stream()):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None
        pool = [] if pool is None else pool
        pool.append(graph)
        graph.pool = pool
