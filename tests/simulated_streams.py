"""Streams, events and graphs of the GPU of `simulated.py`: what was told, and when it is done."""

from collections import Counter, deque

import torch


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def garbage(x: torch.Tensor) -> None:
    whole = x.new_empty(0).set_(x.untyped_storage())
    if x.dtype.is_floating_point:
        whole.fill_(float("nan"))
    elif x.dtype == torch.bool:
        whole.fill_(True)
    else:
        whole.fill_(-77)


class Stream:
    def __init__(self, gpu):
        self._gpu, self.queue, self.done, self.told = gpu, deque(), 0, 0

    def push(self, work) -> None:
        self.told += 1
        self.queue.append(work)

    def run(self, until: int) -> None:
        """Everything up to the `until`th thing that the stream was told."""
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
        self.run(self.told)


class Event:
    def __init__(self, gpu, enable_timing=False, **_):
        self._gpu, self._timing = gpu, enable_timing
        self.stream, self.place, self.time = None, 0, None

    def record(self, stream=None) -> None:
        self._gpu.no_capture("an event was recorded")
        self.stream = stream or self._gpu.stream
        self.stream.push(self._pass)
        self.place, self.time = self.stream.told, None

    def _pass(self) -> None:
        self.time = self._gpu.clock

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        self._gpu.no_capture("an event was waited for")
        self._gpu.events += 1
        self.stream.run(self.place)
        # what nothing waits for goes on meanwhile
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
    """What was captured: work, the memory it was given, the memory of others that it uses."""

    def __init__(self, gpu):
        self._gpu, self.work, self.given, self.used, self.pool = gpu, [], {}, {}, None
        self.names: Counter = Counter()

    def replay(self) -> None:
        gpu = self._gpu
        if self.pool is None:
            raise RuntimeError("a graph was replayed that holds no capture")
        for place, what in self.used.items():
            if not gpu.kept[place]:
                raise RuntimeError(f"a graph uses memory that was given back: {what}")
        # graphs of one pool use each other's memory where nobody has kept it
        free = [x for g in self.pool for p, x in g.given.items() if not gpu.kept[p]]

        def run() -> None:
            for x in free:
                garbage(x)
            for work in self.work:
                gpu.clock += 0.001
                work()

        gpu.replays += 1
        gpu.stream.push(run)
