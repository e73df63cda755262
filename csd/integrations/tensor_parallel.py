"""One model over several devices: rank 0 decides, all ranks compute.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every rank makes a `ParallelEngine` and makes the same calls. Rank 0 runs csd's loop: it admits
prompts, fills and clears slots, drafts from its graph, sets the pool's size, and stops. Once a step
it sends its decisions to the other ranks. Forward, verify and commit run alike on all ranks, from
the same logits, and only rank 0 has a graph, so another rank changes neither drafts nor samples.
Where ranks are called with different arguments, or one raises, the call ends on all of them at
once with an error that names the difference or the rank; the next call can run.
"""

import math
import threading
import zlib
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from csd.engine.budget import Budget, FixedBudget, StepTimeTable
from csd.engine.call import Call, RunSettings
from csd.engine.engine import Engine, Feed
from csd.engine.options import Options
from csd.engine.requests import Request
from csd.engine.result import Sample
from csd.engine.row_options import OFF
from csd.engine.step import Step
from csd.integrations.tensor_parallel_decoder import ParallelDecoder
from csd.integrations.tensor_parallel_link import Link, error_text
from csd.models.load import Loaded
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# written by commit alone, alike on every rank
_COMMITTED = ("tokens", "logprobs", "raw_logprobs")
_GROUPS = ("prompt_len", "group_key")
# [S] each: one of these differs once the host has put another sample into a slot
_OCCUPANT = ("live", "group", "key", "sample", "generated")
_STATE = (*_OCCUPANT, "context")


class ParallelEngine(Engine):
    """A `csd.Engine` over the processes of `mesh`; all of them make the same calls.

    model: a whole `transformers` model, the same on every rank; it is split in place.
    mesh: one-dimensional; by default every process of the group, "nccl" on CUDA, "gloo" on CPU.
    options: as `Engine` takes them.

    Every rank gets the results of rank 0, whose seed and drafts count; `until` and `callback` run
    there only. Prompts, numbers of samples and how to draw them must be the same on all ranks:
    ValueError names the first difference. Where a rank raises, it raises its own error and the
    others RuntimeError with that rank and error. Steps run one operation at a time, never from a
    captured graph.
    """

    def __init__(
        self, model: Any, *, mesh: DeviceMesh | None = None, tokenizer: Any = None, **options: Any
    ):
        if mesh is None:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            mesh = init_device_mesh(kind, (dist.get_world_size(),))
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim}")
        generation_config = model.generation_config
        self.link = link = Link(mesh)
        self.parts = decoder = ParallelDecoder(model, mesh, link)
        dtype = decoder.norm.dtype
        loaded = Loaded(decoder, decoder.config, tokenizer, generation_config, link.device, dtype)
        if options.get("static"):
            raise ValueError("static must be False: what rank 0 decides goes over the host")
        super().__init__(loaded, **options | {"static": False})

    def prepare(self, prompt: Any, **options: Unpack[Options]) -> Call:
        """As `Engine.prepare`; rank 0 alone writes a recording."""
        call = super().prepare(prompt, **options)
        if self.link.rank:
            call.record = None
        return call

    def run(
        self, requests: list[Request], settings: RunSettings, feed: Feed | None = None
    ) -> Generator[tuple[Request, Sample], None, None]:
        """As `Engine.run`; ranks other than 0 yield the samples that rank 0 has drawn."""
        if feed is not None:
            raise ValueError("AsyncEngine must have an engine of one process, got a ParallelEngine")
        self._not_within_a_stream()
        refused = None
        if settings.verifier != "match":
            refused = NotImplementedError(
                f"verifier={settings.verifier!r}: over several ranks there is 'match' only"
            )
        asked = _of_one_rank(requests, settings)
        if asked:
            refused = NotImplementedError(f"{asked}: over several ranks csd does not serve it")
        self.link.meet(_shared_arguments(requests), refused)
        yield from self._follow(requests) if self.link.rank else self._lead(requests, settings)

    def refuse(self, error: Exception) -> None:
        """End the call on the other ranks too, which wait for this one."""
        if not self._in_my_call():
            self.link.meet(None, error)

    def _lead(
        self, requests: list[Request], settings: RunSettings
    ) -> Iterator[tuple[Request, Sample]]:
        error = None
        try:
            yield from super().run(requests, settings)
        except Exception as raised:
            error = raised
            raise
        finally:
            try:
                self._end(requests, error)
            finally:
                if error is not None or self.link.closed:
                    # the others' slots and caches may be behind: the next call makes new ones
                    self._drop()

    def _end(self, requests: list[Request], error: Exception | None) -> None:
        if self.link.closed:
            return
        if error is not None:
            self.link.send("failed", error_text(error))
            return
        self.link.send("end", [(r.seed, r.result(), r.stats) for r in requests])
        self.link.agree(None)

    def _prepare(
        self, requests: list[Request], drafter: Any, share: str | None = None, nodes: int = 0
    ) -> Step:
        before = self._step
        step = super()._prepare(requests, drafter, share, nodes)
        if step is not before:
            cache = step.cache
            tables = (cache.slot_pages.shape[1], cache.prompt_pages.shape[1])
            kept = (step.slots.context.shape[1], cache.node_k.shape[1])
            sizes = (step.slots.count, *tables, cache.k.shape[1], *kept)
            self.link.send("allocate", sizes)
            self.link.agree(None)
        return step

    def _allocate(self, *sizes: Any) -> Step:
        step = super()._allocate(*sizes)
        values = {f.name: getattr(step, f.name) for f in fields(step)}
        if self.link.rank:
            return FollowerStep(**values | {"drafting": False}, link=self.link)
        return LeaderStep(**values, link=self.link)

    def measure_steps(self, worth: float = math.inf) -> StepTimeTable:
        # the same passes on every rank, so none is left out by a rank's own times; only rank 0
        # uses them
        if not self.link.rank:
            self.link.send("measure", None)
            self.link.agree(None)
        return super().measure_steps(math.inf)

    def _follow(self, requests: list[Request]) -> Iterator[tuple[Request, Sample]]:
        with self._lock:
            self._busy = threading.get_ident()
            done = self._execute_orders()
            for request, (seed, samples, stats) in zip(requests, done, strict=True):
                request.seed, request.stats = seed, stats
                request.waiting.clear()
                for sample in samples:
                    request.finished[sample.index] = sample
                    yield request, sample

    def _execute_orders(self) -> list:
        """Execute the orders of rank 0 until its call ends; returns what it has drawn."""
        kept: BaseException | None = None  # to be reported at the next order
        while True:
            order, what = self.link.receive()
            if order == "failed":
                raise kept or RuntimeError(f"rank 0 failed: {what}")
            try:
                if order == "prompt":
                    self._follow_prompt(kept, *what)
                elif order == "step":
                    step = self._following()
                    step.take(what, kept)
                    step(0, FixedBudget(0))
                else:
                    self.link.agree(kept)
                    if order == "end":
                        return what
                    if order == "measure":
                        self.measure_steps()
                    else:
                        self._step = self._allocate(*what)
            except BaseException as error:
                if self.link.closed:
                    raise
                kept = error

    def _follow_prompt(
        self, kept: BaseException | None, g: int, chunk: list[int], start: int, pages: torch.Tensor
    ) -> None:
        with self.link.together(self.parts.exchanges(len(chunk), head=False)):
            if kept is not None:
                raise kept
            step = self._following()
            step.cache.prompt_pages[g] = pages
            step.read_prompt(g, chunk, start)

    def _following(self) -> "FollowerStep":
        if not isinstance(self._step, FollowerStep):
            raise RuntimeError(f"rank {self.link.rank} got a step's order before its caches' sizes")
        return self._step


def _of_one_rank(requests: list[Request], settings: RunSettings) -> str | None:
    """Options that the other ranks would not compute."""
    for request in requests:
        for name, off in OFF.items():
            if getattr(request.params, name) != off:
                return name
        if request.prompt_logprobs is not None:
            return "prompt_logprobs"
    return None if settings.forcing is None else "scoring"


def _shared_arguments(requests: list[Request]) -> dict[str, Any]:
    """The arguments that must be equal on all ranks, by name."""
    prompts = "|".join(str(r.prompt) for r in requests)
    shared: dict[str, Any] = {"the number of prompts": len(requests)}
    shared["the prompts' checksum"] = zlib.crc32(prompts.encode())
    if requests:
        samples = requests[0].samples
        shared |= {"num_samples": len(samples), "first_sample": samples.start}
        shared |= asdict(requests[0].params)
    return shared


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
        """Called before the pass, inside its exchanges."""


@dataclass(slots=True)
class LeaderStep(LinkedStep):
    """A step of rank 0. It sends its pool and the slots that the host has edited to the others."""

    _sent: dict = field(default_factory=dict)  # the slots as the others have them

    def read_prompt(self, g: int, chunk: list[int], start: int) -> torch.Tensor:
        self.link.send("prompt", (g, chunk, start, self.cache.prompt_pages[g]))
        decoder: Any = self.decoder
        with self.link.together(decoder.exchanges(len(chunk), head=False)):
            return Step.read_prompt(self, g, chunk, start)

    def propose(self, live: int, budget: Budget) -> Pool:
        pool = Step.propose(self, live, budget)
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
    """A step of another rank. It runs the pool of rank 0 and has no graph."""

    _order: dict = field(default_factory=dict)
    _kept: BaseException | None = None

    def take(self, order: dict, kept: BaseException | None) -> None:
        """The order of the next step; kept: an error of this rank that it has yet to report."""
        self._order, self._kept = order, kept

    def propose(self, live: int, budget: Budget) -> Pool:
        return Pool(**self._order["pool"])

    def ready(self) -> None:
        """Make the edits of rank 0's slots here."""
        if self._kept is not None:
            raise self._kept
        order = self._order
        if not order:
            # a pass that is only timed
            return
        here = {name: getattr(self.slots, name) for name in _STATE}
        if order["digest"] not in (None, _digest(here)):
            raise RuntimeError(
                f"rank {self.link.rank} and rank 0 disagree about what has been committed"
            )
        rows = order["rows"]
        for name, value in order["slots"].items():
            getattr(self.slots, name)[rows] = value
        for name, value in order["groups"].items():
            getattr(self.slots, name).copy_(value)
        self.cache.slot_pages[rows] = order["pages"]


def _vars(x: Pool | Slots) -> dict[str, torch.Tensor]:
    return {f.name: getattr(x, f.name) for f in fields(x)}


def _digest(state: dict[str, torch.Tensor]) -> int | None:
    """A checksum of the slots' state: ranks that have committed different tokens differ in it."""
    if not state:
        return None
    total = 0
    for i, x in enumerate(state.values(), 1):
        flat = x.long().flatten()
        weight = torch.arange(1, flat.shape[0] + 1, device=flat.device)
        total += i * int((flat * weight).sum())
    return total
