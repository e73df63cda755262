"""One model over several devices: rank 0 decides, all ranks compute.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every rank makes a `ParallelEngine` and makes the same calls. Rank 0 runs csd's loop: it admits
prompts, fills and clears slots, drafts from its graph, sets the pool's size, and stops. What it
decided goes to the others once a step, and they follow: forward, verify and commit run alike on
all ranks, from the same logits, and only rank 0 has a graph. So another rank cannot change what is
drafted, let alone what is sampled.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from csd.budget import CostModel
from csd.engine import Engine
from csd.integrations.tensor_parallel_decoder import ParallelDecoder
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

    Every rank gets the results of rank 0, whose prompts and arguments count; `until` and `callback`
    run there only. Steps run one operation at a time, never from a captured graph.
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
        decoder = ParallelDecoder(model, mesh)
        device, dtype = decoder.norm.device, decoder.norm.dtype
        self.link = Link(mesh, device)
        loaded = Loaded(decoder, decoder.config, tokenizer, generation_config, device, dtype)
        if options.get("static"):
            raise ValueError("static must be False: what rank 0 decides goes over the host")
        super().__init__(loaded, **options | {"static": False})

    def run(
        self, jobs: list[Job], *, verifier: str = "match", **options: Any
    ) -> Generator[tuple[Job, Sample], None, None]:
        """As `Engine.run`; on ranks other than 0, the samples that rank 0 has drawn."""
        if verifier != "match":
            raise NotImplementedError(
                f"verifier={verifier!r}: over several ranks there is 'match' only"
            )
        if self.link.rank:
            yield from self._follow(jobs)
            return
        try:
            yield from super().run(jobs, **options)
        finally:
            self.link.send("end", [(job.seed, job.result(), job.stats) for job in jobs])

    def read_prompt(self, step: Step, g: int, chunk: list[int], start: int) -> None:
        if not self.link.rank:
            self.link.send("prompt", (g, chunk, start, step.cache.prompt_pages[g]))
        super().read_prompt(step, g, chunk, start)

    def _prepare(self, jobs: list[Job], drafter: Any) -> Step:
        before = self._step
        step = super()._prepare(jobs, drafter)
        if step is not before:
            cache = step.cache
            tables = (cache.slot_pages.shape[1], cache.prompt_pages.shape[1])
            sizes = (step.slots.count, *tables, cache.k.shape[1], step.slots.context.shape[1])
            self.link.send("allocate", sizes)
        return step

    def _allocate(self, *sizes: int) -> Step:
        step = super()._allocate(*sizes)
        values = {f.name: getattr(step, f.name) for f in fields(step)}
        if self.link.rank:
            return FollowerStep(**values | {"drafting": False})
        return LeaderStep(**values, link=self.link)

    def measure_steps(self) -> CostModel:
        # the same passes on every rank; only rank 0 looks at the clock
        if not self.link.rank:
            self.link.send("measure", None)
        return super().measure_steps()

    def _follow(self, jobs: list[Job]) -> Iterator[tuple[Job, Sample]]:
        while True:
            order, what = self.link.receive()
            if order == "allocate":
                self._step = self._allocate(*what)
            elif order == "measure":
                self.measure_steps()
            elif order == "prompt":
                g, chunk, start, pages = what
                step = self._following()
                step.cache.prompt_pages[g] = pages
                self.read_prompt(step, g, chunk, start)
            elif order == "step":
                step = self._following()
                step.take(what, self.link.rank)
                step(0, None)
            else:
                break
        if len(what) != len(jobs):
            raise ValueError(f"rank 0 has {len(what)} prompts, rank {self.link.rank} {len(jobs)}")
        for job, (seed, samples, stats) in zip(jobs, what, strict=True):
            job.seed, job.stats = seed, stats
            job.waiting.clear()
            for sample in samples:
                job.finished[sample.index] = sample
                yield job, sample

    def _following(self) -> "FollowerStep":
        if not isinstance(self._step, FollowerStep):
            raise RuntimeError(f"rank {self.link.rank} got a step's order before its caches' sizes")
        return self._step


class Link:
    """Orders of rank 0 to the other ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh, device: torch.device):
        self.rank = mesh.get_local_rank()
        self._group, self._device = mesh.get_group(), device
        self._source = dist.get_global_rank(self._group, 0)

    def send(self, order: str, what: object) -> None:
        self._broadcast([order, _to(what, "cpu")])

    def receive(self) -> tuple:
        order, what = self._broadcast([None, None])
        return order, _to(what, self._device)

    def _broadcast(self, box: list) -> list:
        dist.broadcast_object_list(box, src=self._source, group=self._group, device=self._device)
        return box


def _to(what: Any, device: str | torch.device) -> Any:
    if torch.is_tensor(what):
        return what.to(device)
    if isinstance(what, dict):
        return {k: _to(v, device) for k, v in what.items()}
    return tuple(_to(v, device) for v in what) if isinstance(what, tuple) else what


@dataclass(slots=True)
class LeaderStep(Step):
    """A step of rank 0: what it proposes goes to the others, with the slots the host has edited."""

    link: Any = None  # the Link that made it
    _sent: dict = field(default_factory=dict)  # the slots as the others have them

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
class FollowerStep(Step):
    """A step of another rank: it proposes what it is told to and asks no graph of its own."""

    _pool: Any = None  # csd.pool.Pool

    def take(self, told: dict, rank: int) -> None:
        """Edit the slots as rank 0 has, and keep its pool for the step."""
        here = {name: getattr(self.slots, name) for name in _STATE}
        if told["digest"] not in (None, _digest(here)):
            raise RuntimeError(f"rank {rank} and rank 0 disagree about what has been committed")
        rows = told["rows"]
        for name, value in told["slots"].items():
            getattr(self.slots, name)[rows] = value
        for name, value in told["groups"].items():
            getattr(self.slots, name).copy_(value)
        self.cache.slot_pages[rows] = told["pages"]
        self._pool = Pool(**told["pool"])

    def propose(self, live: int, budget: Any) -> Pool:
        return self._pool


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
