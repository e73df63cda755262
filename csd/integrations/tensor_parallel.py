"""One model over several devices: rank 0 decides, all ranks compute.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every rank makes a `ParallelEngine` and makes the same calls. Rank 0 runs csd's loop: it admits
prompts, fills and clears slots, drafts from its graph, sets the pool's size, and stops. What it
decided goes to the others once a step, and they follow: forward, verify and commit run alike on
all ranks, from the same logits, and only rank 0 has a graph. So another rank cannot change what is
drafted, let alone what is sampled. Ranks that were asked for different things, or one that raises,
end the call on all of them at once, with an error that says so; the next call can go on.
"""

import threading
import zlib
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from csd.cost import CostModel
from csd.engine import Engine
from csd.integrations.tensor_parallel_decoder import ParallelDecoder
from csd.integrations.tensor_parallel_link import Link, error_text
from csd.job import Job
from csd.models.load import Loaded
from csd.pool import Pool
from csd.result import Sample
from csd.slots import Slots
from csd.step import Step
from csd.verdict import Verdict

# written by commit alone, alike on every rank
_COMMITTED = ("tokens", "logprobs", "raw_logprobs")
_GROUPS = ("prompt_len", "group_key")
# [S] each: these say whether the host has put another sample into a slot
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

    def run(
        self, jobs: list[Job], *, verifier: str = "match", **options: Any
    ) -> Generator[tuple[Job, Sample], None, None]:
        """As `Engine.run`; on ranks other than 0, the samples that rank 0 has drawn."""
        self._not_within_a_stream()
        refused = None
        if verifier != "match":
            refused = NotImplementedError(
                f"verifier={verifier!r}: over several ranks there is 'match' only"
            )
        self.link.meet(_asked(jobs), refused)
        yield from self._follow(jobs) if self.link.rank else self._lead(jobs, options)

    def _refused(self, error: Exception) -> None:
        """The others, which expect a call, fail too."""
        if self._busy != threading.get_ident():
            self.link.meet(None, error)

    def _lead(self, jobs: list[Job], options: dict) -> Iterator[tuple[Job, Sample]]:
        error = None
        try:
            yield from super().run(jobs, **options)
        except Exception as raised:
            error = raised
            raise
        finally:
            try:
                self._end(jobs, error)
            finally:
                if error is not None or self.link.silent:
                    # the others' slots and caches may be behind: the next call makes new ones
                    self._drop()

    def _end(self, jobs: list[Job], error: Exception | None) -> None:
        if self.link.silent:
            return
        if error is not None:
            self.link.send("failed", error_text(error))
            return
        self.link.send("end", [(job.seed, job.result(), job.stats) for job in jobs])
        self.link.agree(None)

    def _prepare(self, jobs: list[Job], drafter: Any) -> Step:
        before = self._step
        step = super()._prepare(jobs, drafter)
        if step is not before:
            cache = step.cache
            tables = (cache.slot_pages.shape[1], cache.prompt_pages.shape[1])
            sizes = (step.slots.count, *tables, cache.k.shape[1], step.slots.context.shape[1])
            self.link.send("allocate", sizes)
            self.link.agree(None)
        return step

    def _allocate(self, *sizes: int) -> Step:
        step = super()._allocate(*sizes)
        values = {f.name: getattr(step, f.name) for f in fields(step)}
        if self.link.rank:
            return FollowerStep(**values | {"drafting": False}, link=self.link)
        return LeaderStep(**values, link=self.link)

    def measure_steps(self) -> CostModel:
        # the same passes on every rank; only rank 0 looks at the clock
        if not self.link.rank:
            self.link.send("measure", None)
            self.link.agree(None)
        return super().measure_steps()

    def _follow(self, jobs: list[Job]) -> Iterator[tuple[Job, Sample]]:
        self._busy = threading.get_ident()
        try:
            for job, (seed, samples, stats) in zip(jobs, self._obey(), strict=True):
                job.seed, job.stats = seed, stats
                job.waiting.clear()
                for sample in samples:
                    job.finished[sample.index] = sample
                    yield job, sample
        finally:
            self._busy = None

    def _obey(self) -> list:
        """Do what rank 0 says until its call ends; returns what it has drawn."""
        kept: BaseException | None = None  # to be told at the next order
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
                    step(0, None)
                else:
                    self.link.agree(kept)
                    if order == "end":
                        return what
                    if order == "measure":
                        self.measure_steps()
                    else:
                        self._step = self._allocate(*what)
            except BaseException as error:
                if self.link.silent:
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


def _asked(jobs: list[Job]) -> dict[str, Any]:
    """What must be the same on all ranks, by its name."""
    prompts = "|".join(str(job.prompt) for job in jobs)
    asked: dict[str, Any] = {"the number of prompts": len(jobs)}
    asked["the prompts' checksum"] = zlib.crc32(prompts.encode())
    if jobs:
        samples = jobs[0].samples
        asked |= {"num_samples": len(samples), "first_sample": samples.start}
        asked |= asdict(jobs[0].params)
    return asked


@dataclass(slots=True)
class LinkedStep(Step):
    """A step of one of several ranks: they run the pass together or not at all."""

    link: Any = None  # a Link

    def forward(self, pool: Pool) -> torch.Tensor:
        decoder: Any = self.decoder
        with self.link.together(decoder.exchanges(pool.rows, head=True)):
            self.ready()
            return Step.forward(self, pool)

    def ready(self) -> None:
        """What is still to be done before the pass."""


@dataclass(slots=True)
class LeaderStep(LinkedStep):
    """A step of rank 0: what it proposes goes to the others, with the slots the host has edited."""

    _sent: dict = field(default_factory=dict)  # the slots as the others have them

    def read_prompt(self, g: int, chunk: list[int], start: int) -> None:
        self.link.send("prompt", (g, chunk, start, self.cache.prompt_pages[g]))
        decoder: Any = self.decoder
        with self.link.together(decoder.exchanges(len(chunk), head=False)):
            Step.read_prompt(self, g, chunk, start)

    def propose(self, live: int, budget: Any) -> Pool:
        pool = Step.propose(self, live, budget)
        told = {"digest": _digest(self._sent), "pool": _vars(pool)} | self._edits()
        self.link.send("step", told)
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
    """A step of another rank: it proposes what it is told to and asks no graph of its own."""

    _told: dict = field(default_factory=dict)
    _kept: BaseException | None = None

    def take(self, told: dict, kept: BaseException | None) -> None:
        """What rank 0 wants of the step that follows; kept: what has gone wrong here before."""
        self._told, self._kept = told, kept

    def propose(self, live: int, budget: Any) -> Pool:
        return Pool(**self._told["pool"])

    def ready(self) -> None:
        """Edit the slots as rank 0 has."""
        if self._kept is not None:
            raise self._kept
        told = self._told
        if not told:
            # a pass that is only timed
            return
        here = {name: getattr(self.slots, name) for name in _STATE}
        if told["digest"] not in (None, _digest(here)):
            raise RuntimeError(
                f"rank {self.link.rank} and rank 0 disagree about what has been committed"
            )
        rows = told["rows"]
        for name, value in told["slots"].items():
            getattr(self.slots, name)[rows] = value
        for name, value in told["groups"].items():
            getattr(self.slots, name).copy_(value)
        self.cache.slot_pages[rows] = told["pages"]


def _vars(x: Pool | Slots) -> dict[str, torch.Tensor]:
    return {f.name: getattr(x, f.name) for f in fields(x)}


def _digest(state: dict[str, torch.Tensor]) -> int | None:
    """A number that differs where slots do. Ranks commit alike, or this shows that they do not."""
    if not state:
        return None
    total = 0
    for i, x in enumerate(state.values(), 1):
        flat = x.long().flatten()
        weight = torch.arange(1, flat.shape[0] + 1, device=flat.device)
        total += i * int((flat * weight).sum())
    return total
