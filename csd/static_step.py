"""The step at fixed pool sizes: nothing in it reads the device, so a CUDA graph can hold it.

A pool has one of a few sizes; what live slots do not fill is padding. On a GPU each size is
captured once and replayed. The host learns what a step decided from a copy that the device makes
behind the step, one step later, so it never waits for the step it has just launched. Events around
a replay say afterwards what it took.
"""

import time
from dataclasses import dataclass, field

import torch

from csd.capture import Captures
from csd.pool import Pool
from csd.record import Pending, Snapshot
from csd.step import Step
from csd.verdict import Verdict

SIZES = (16, 32, 64, 128, 192, 256, 384, 512)


def sizes_for(slots: int) -> list[int]:
    """Pool sizes, and as many more as `slots` roots need."""
    sizes = [*SIZES]
    while sizes[-1] < slots:
        sizes.append(sizes[-1] + 128)
    return sizes


@dataclass(slots=True)
class StaticStep(Step):
    """The five functions over a pool of fixed size. Its drafter is a ConsensusGraph."""

    top: bool = False  # whether snapshots hold the top 8 of committed tokens
    trees: bool = False  # and the trees
    captures: Captures = field(default_factory=Captures)  # by pool size, nodes and flags

    def body(self, rows: int, nodes: int) -> tuple[Pool, Verdict]:
        """One step over `rows` rows with at most `nodes` drafted ones."""
        pool = self.drafter.propose(self.slots, rows, nodes=nodes)
        verdict = self.ops.verify(self.forward(pool), pool, self.slots)
        self.commit(verdict)
        self.insert(pool, verdict)
        return pool, verdict

    def launch(self, rows: int, nodes: int, owners: list, step: int) -> Pending:
        """Run a step; what it decided is on its way to the host when this returns."""
        if not self.slots.live.is_cuda:
            start = time.perf_counter()
            snapshot, _ = self._snapshot(rows, nodes)
            pending = Pending.of(snapshot, owners, step)
            pending.model_seconds = time.perf_counter() - start
            return pending
        snapshot, begun = self._replay(rows, nodes)
        pending = Pending.of(snapshot, owners, step)
        # the next replay overwrites the snapshot, but not before these copies
        pending.ints, pending.floats = (
            torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            for x in (snapshot.ints, snapshot.floats)
        )
        pending.begun, pending.done = begun, _event()
        return pending

    def _replay(self, rows: int, nodes: int) -> tuple[Snapshot, torch.cuda.Event]:
        key = rows, nodes, self.top, self.trees, self.drafting
        if key not in self.captures.graphs:
            # it is recorded on no slot
            live = self.slots.live.clone()
            self.slots.live.zero_()
            try:
                self.captures.get(key, lambda: self._snapshot(rows, nodes))
            finally:
                self.slots.live.copy_(live)
        graph, (snapshot, _) = self.captures.graphs[key]
        # behind the capture, which is no part of the step
        begun = _event()
        graph.replay()
        return snapshot, begun

    def _snapshot(self, rows: int, nodes: int) -> tuple[Snapshot, tuple[Pool, Verdict]]:
        # a graph's pool and verdict are kept: the next graph must not take their memory
        kept = self.body(rows, nodes)
        return Snapshot(*kept, self.top, self.trees, self.ops.snapshot), kept


def _event() -> torch.cuda.Event:
    """A point in the current stream, with the time at which the device gets there."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
