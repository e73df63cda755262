"""Step at fixed pool sizes: nothing in it reads the device, so a CUDA graph can capture it.

A pool has one of a few sizes; rows that live slots do not fill are padding. On a GPU each size is
captured once and replayed; the graphs share one stream and one memory pool (`Captures`). A copy of
a step's result to the host is queued after the step, and the host reads it one step later, so it
never waits for the step it has just launched. Events around a replay measure its time.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch

from csd.engine.results.record import PendingRecord, Record, Snapshot
from csd.engine.step.budget import Budget
from csd.engine.step.step import Clock, Step
from csd.graph.drafter import StaticDrafter
from csd.models.fused.decoder import Decoder
from csd.models.module.decoder import ModuleDecoder
from csd.state.pool import Pool
from csd.state.verdict import Verdict
from csd.utils.collector import paused
from csd.utils.phases import phase

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
        with phase("compiling a step's kernels", on_gpu, kind="compile"):
            with torch.cuda.stream(self.warming):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(self.warming)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # if the garbage collector freed a kernel meanwhile, the capture would fail
        with paused():
            # other threads may continue to use the device, except for waiting for all of it and
            # drawing from torch's default generator
            options = dict(pool=self.memory, stream=self.stream, capture_error_mode="thread_local")
            with (
                phase("capturing a step", on_gpu, kind="compile"),
                torch.cuda.graph(graph, **options),
            ):
                result = run()
        return graph, result


# numbers of rows of a pool; a smaller one is padded to the next size
SIZES = (16, 32, 64, 96, 128, 160, 192, 256, 384, 512)


def sizes_for(slots: int) -> list[int]:
    """Ascending pool sizes, extended until the last holds `slots` roots."""
    sizes = [*SIZES]
    while sizes[-1] < slots:
        sizes.append(sizes[-1] + 128)
    return sizes


@dataclass(slots=True)
class StaticStep(Step):
    """The five phases of a step over a pool of fixed size."""

    drafter: StaticDrafter | None

    phases: ClassVar[tuple[str, ...]] = ("step",)
    static: ClassVar[bool] = True

    captures: Captures = field(default_factory=Captures)  # by pool size, nodes and flags

    def __post_init__(self) -> None:
        Step.__post_init__(self)
        # which rows accepted paths reach is unknown to the host: sample all rows
        self.ops = replace(self.ops, verify=self.ops.verify_all)

    def body(self, rows: int, nodes: int) -> tuple[Snapshot, Pool, Verdict]:
        """Run one step over `rows` rows with at most `nodes` drafted nodes."""
        if self.drafting:
            assert self.drafter is not None
            pool = self.drafter.propose(self.slots, rows, nodes=nodes)
        else:
            # the drafter may not be attached, and then has no memory
            pool = self.ops.roots(self.slots, rows)
        verdict, snapshot = self.verify(self.forward(pool), pool)
        self.commit(pool, verdict)
        self.insert(pool, verdict)
        return snapshot, pool, verdict

    def count_live(self, owned: int) -> int:
        """Number of slots with samples on the host, since the device is not read."""
        return owned

    def launch(self, live_count: int, budget: Budget, owners: Iterable, step: int) -> PendingRecord:
        """Launch a step, and the copy of its result to the host.

        The budget chooses the number of rows from records that have already been read.
        """
        clock = Clock(self.seconds)
        rows, nodes = budget.pool_shape(live_count)
        pending = self.start(rows, nodes, owners, step)
        clock.lap("step")
        return pending

    def read(self, pending: PendingRecord) -> Record:
        clock = Clock(self.seconds)
        record = pending.read()
        clock.lap("step")
        return record

    def start(self, rows: int, nodes: int, owners: Iterable, step: int) -> PendingRecord:
        """Launch a step of `rows` rows and at most `nodes` drafted nodes."""
        if not self.slots.live.is_cuda:
            start = time.perf_counter()
            snapshot, *_ = self.body(rows, nodes)
            seconds = time.perf_counter() - start
            return PendingRecord(list(owners), step, snapshot, model_seconds=seconds)
        if isinstance(self.decoder, Decoder | ModuleDecoder):
            # a replay runs no forward pass on the host
            self.decoder.follow()
        graph, snapshot = self.captured(rows, nodes)
        # recorded after the capture, which does not count as the step's time
        begun = _event()
        graph.replay()
        # the next replay overwrites the snapshot, but only after these copies
        ints, floats = (
            torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            for x in (snapshot.ints, snapshot.floats)
        )
        snapshot = replace(snapshot, ints=ints, floats=floats)
        return PendingRecord(list(owners), step, snapshot, begun, _event())

    def captured(self, rows: int, nodes: int) -> tuple[torch.cuda.CUDAGraph, Snapshot]:
        """The graph of a step and its snapshot; captured at the first use of its key."""
        changes = None if self.changes is None else self.changes.key
        own = getattr(self.decoder, "graph_key", None)
        key = rows, nodes, self.top, self.trees, self.drafting, changes, self.measures, own
        if key not in self.captures.graphs:
            with self.without_live():
                # keep the graph's pool and verdict: the next graph must not reuse their memory
                graph, _ = self.captures.get(key, lambda: self.body(rows, nodes))
                # the first replay uploads the graph, which must not count as a step's time
                graph.replay()
        graph, (snapshot, *_) = self.captures.graphs[key]
        return graph, snapshot

    @contextmanager
    def without_live(self) -> Iterator[None]:
        """Context in which no slot is live, so steps change no sample."""
        live = self.slots.live.clone()
        self.slots.live.zero_()
        try:
            yield
        finally:
            self.slots.live.copy_(live)


def capture_all(step: Step) -> None:
    """Capture all graphs that an automatic budget may choose, if `step` is static on a GPU."""
    if isinstance(step, StaticStep) and step.slots.live.is_cuda:
        for rows in sizes_for(step.slots.count):
            for nodes in (0, rows):
                step.captured(rows, nodes)


def dynamic(step: Step) -> Step:
    """The same step with shapes that depend on the live slots."""
    if not isinstance(step, StaticStep):
        return step
    return Step(step.decoder, None, step.cache, step.slots, step.ops, share_rows=step.share_rows)


def _event() -> torch.cuda.Event:
    """Record a timing event in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
