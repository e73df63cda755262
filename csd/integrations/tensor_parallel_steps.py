"""Steps of the ranks of a `ParallelEngine`: rank 0 sends its pool and its edits of slots.

Each step also sends a checksum of the slots, from which a rank detects that its slots differ.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from csd.engine.step.budget import Budget
from csd.engine.step.step import Step
from csd.kernels.attention.prompt import PromptChunk
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# written by commit only, with the same values on every rank
_COMMITTED = ("tokens", "logprobs", "raw_logprobs")
_GROUPS = ("prompt_len", "group_key")
# [S] each: at least one of these changes when the host puts another sample into a slot
_OCCUPANT = ("live", "group", "key", "sample", "generated")
_STATE = (*_OCCUPANT, "context")


@dataclass(slots=True)
class LinkedStep(Step):
    """A step of one rank. Either all ranks run its pass or none does."""

    link: Any = None  # a Link

    def forward(self, pool: Pool) -> torch.Tensor:
        decoder: Any = self.decoder
        with self.link.together(decoder.exchanges(pool.rows, head=True)):
            self.ready()
            return Step.forward(self, pool)

    def ready(self) -> None:
        """Hook that runs before the pass, within `Link.together`."""


@dataclass(slots=True)
class LeaderStep(LinkedStep):
    """Step of rank 0, which sends its pool and the slots edited by the host to the other ranks."""

    _sent: dict = field(default_factory=dict)  # state of the slots on the other ranks

    def prompt_pass(self, parts: Sequence[PromptChunk]) -> AbstractContextManager[None]:
        ((g, chunk, start, _),) = parts
        self.link.send("prompt", (g, list(chunk), start, self.cache.prompt_pages[g]))
        decoder: Any = self.decoder
        return self.link.together(decoder.exchanges(len(chunk), head=False))

    def propose(self, live_count: int, budget: Budget) -> Pool:
        pool = Step.propose(self, live_count, budget)
        order = {"digest": _digest(self._sent), "pool": _vars(pool)} | self._edits()
        self.link.send("step", order)
        return pool

    def commit(self, verdict: Verdict) -> None:
        Step.commit(self, verdict)
        self._sent = {name: getattr(self.slots, name).clone() for name in _STATE}

    def _edits(self) -> dict:
        slots = self.slots
        rows = torch.arange(slots.count, device=slots.live.device)
        if self._sent:
            changed = [getattr(slots, name) != self._sent[name] for name in _OCCUPANT]
            rows = rows[torch.stack(changed).any(0)]
        edited = {k: v[rows] for k, v in _vars(slots).items() if k not in _COMMITTED + _GROUPS}
        groups = {name: getattr(slots, name) for name in _GROUPS}
        pages = self.cache.slot_pages[rows]
        return {"rows": rows, "slots": edited, "groups": groups, "pages": pages}


@dataclass(slots=True)
class FollowerStep(LinkedStep):
    """Step of another rank, which runs the pool of rank 0 and has no graph."""

    _order: dict = field(default_factory=dict)
    _kept: BaseException | None = None

    def take(self, order: dict, kept: BaseException | None) -> None:
        """Store the order of the next step. kept: an error of this rank, not reported yet."""
        self._order, self._kept = order, kept

    def propose(self, live_count: int, budget: Budget) -> Pool:
        return Pool(**self._order["pool"])

    def ready(self) -> None:
        """Apply rank 0's edits to the slots of this rank."""
        if self._kept is not None:
            raise self._kept
        order = self._order
        if not order:
            # a pass that is only timed has no order
            return
        here = {name: getattr(self.slots, name) for name in _STATE}
        if order["digest"] not in (None, _digest(here)):
            raise RuntimeError(f"rank {self.link.rank} and rank 0 have committed different tokens")
        rows = order["rows"]
        for name, value in order["slots"].items():
            getattr(self.slots, name)[rows] = value
        for name, value in order["groups"].items():
            getattr(self.slots, name).copy_(value)
        self.cache.slot_pages[rows] = order["pages"]


def _vars(x: Pool | Slots) -> dict[str, torch.Tensor]:
    return {f.name: getattr(x, f.name) for f in fields(x)}


def _digest(state: dict[str, torch.Tensor]) -> int | None:
    """Checksum of the slots' state, which depends on the committed tokens; None without state."""
    if not state:
        return None
    total = 0
    for i, x in enumerate(state.values(), 1):
        flat = x.long().flatten()
        weight = torch.arange(1, flat.shape[0] + 1, device=flat.device)
        total += i * int((flat * weight).sum())
    return total
