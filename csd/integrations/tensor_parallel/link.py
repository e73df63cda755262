"""Messages between the ranks of a `ParallelEngine`, and the steps that exchange them.

Beside tensors, ranks exchange orders of rank 0 and errors of any rank (`Link`). A call begins with
`meet`: every rank sends its arguments, or the error with which it refuses them, and a difference
ends the call on all ranks. During the call rank 0 sends orders. The work of an order runs in
`together`: every rank makes all exchanges (collectives) of the order even if a rank raises, and
then checks that none has. All ranks therefore raise at the end of the same pass, with the failed
rank's number and error, and can run another call. Errors inside an exchange itself (a lost
connection, too little memory for a gathered tensor) are left to torch.distributed.

In each step rank 0 sends its pool and its edits of slots (`LeaderStep`), and a checksum of the
slots, from which another rank detects that its slots differ (`FollowerStep`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from csd.engine.step.budget import Budget
from csd.engine.step.step import Step
from csd.kernels.attention.prompt import PromptChunk
from csd.state.pool import Pool
from csd.state.record import declared
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# written by commit only, with the same values on every rank
_COMMITTED = ("tokens", "logprobs", "raw_logprobs")
_GROUPS = ("prompt_len", "group_key", "prior_part")
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

    def commit(self, pool: Pool, verdict: Verdict) -> None:
        Step.commit(self, pool, verdict)
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

    def take(self, order: dict, pending_error: BaseException | None) -> None:
        """Store the order of the next step. pending_error: this rank's, not reported yet."""
        self._order, self._kept = order, pending_error

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
    kind: Any = type(x)
    return {name: getattr(x, name) for name in declared(kind)}


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


Exchange = Callable[[], Any]


class Link:
    """Connection of this rank to the other ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.rank, self.group = mesh.get_local_rank(), mesh.get_group()
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._source = dist.get_global_rank(self.group, 0)
        self._left: deque[Exchange] = deque()
        # True: no further error is exchanged, since every rank has it or an exchange itself failed
        self.closed = False

    def meet(self, arguments: dict | None, refused: BaseException | None = None) -> None:
        """Begin a call. arguments: values by name, which must be equal on all ranks.

        Raises `refused` if it is given, else RuntimeError with the first rank that refused, or
        ValueError with the first difference.
        """
        self.closed = False
        self._left.clear()
        every = self._gather((arguments, refused and error_text(refused)))
        if refused is not None:
            raise refused
        self._raise_first("refused the call", [text for _, text in every])
        first = every[0][0]
        for rank, (other, _) in enumerate(every):
            for name, value in first.items():
                if other[name] != value:
                    raise ValueError(
                        f"{name} must be the same on all ranks, got {value!r} on rank 0 and "
                        f"{other[name]!r} on rank {rank}"
                    )

    def send(self, order: str, what: object) -> None:
        self._broadcast([order, _to(what, "cpu")])

    def receive(self) -> tuple:
        order, what = self._broadcast([None, None])
        return order, _to(what, self.device)

    @contextmanager
    def together(self, exchanges: list[Exchange]) -> Iterator[None]:
        """Run a block in which every rank makes `exchanges`, in order, each through `exchange`.

        If the block raises before it has made all of them, the remaining ones run after it, as
        `exchanges` has them. Raises the rank's own error, or RuntimeError with the first rank that
        has one.
        """
        error = None
        self._left = deque(exchanges)
        try:
            yield
        except BaseException as raised:
            if self.closed:
                raise
            error = raised
        while self._left:
            self.exchange(self._left[0])
        self.agree(error)

    def exchange(self, make: Exchange) -> Any:
        """Make the next exchange by calling `make`; returns its result."""
        try:
            result = make()
        except BaseException:
            self.closed = True
            raise
        if self._left:
            self._left.popleft()
        return result

    def agree(self, error: BaseException | None) -> None:
        """Raise on all ranks if any has an error: its own, else RuntimeError with the first."""
        failed = torch.tensor(int(error is not None), device=self.device)
        self.exchange(lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, self.group))
        if not int(failed):
            return
        every = self._gather(error and error_text(error))
        self.closed = True
        if error is not None:
            raise error
        self._raise_first("failed", every)

    def _raise_first(self, what: str, texts: list[str | None]) -> None:
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"rank {rank} {what}: {text}")

    def _gather(self, mine: object) -> list:
        every = [None] * dist.get_world_size(self.group)
        self.exchange(lambda: dist.all_gather_object(every, mine, self.group))
        return every

    def _broadcast(self, box: list) -> list:
        self.exchange(
            lambda: dist.broadcast_object_list(
                box, src=self._source, group=self.group, device=self.device
            )
        )
        return box


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _to(what: Any, device: str | torch.device) -> Any:
    if torch.is_tensor(what):
        return what.to(device)
    if isinstance(what, dict):
        return {k: _to(v, device) for k, v in what.items()}
    return tuple(_to(v, device) for v in what) if isinstance(what, tuple) else what
