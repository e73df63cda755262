"""One model over several devices: rank 0 decides, all ranks compute.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every rank makes a `ParallelEngine` and makes the same calls. Rank 0 runs csd's loop: it admits
prompts, fills and clears slots, drafts from its graph, sets the pool's size, and stops. Once per
step it sends its decisions to the other ranks. Forward, verify and commit run alike on all ranks,
from the same logits, and only rank 0 has a graph, so more ranks change neither drafts nor samples.
If ranks are called with different arguments, or one raises, the call ends on all of them at once
with an error that names the difference or the rank; the next call can run.
"""

import math
import zlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from csd.engine.call import Call, RunSettings
from csd.engine.engine import Engine, Feed
from csd.engine.options.params import RULES
from csd.engine.requests.request import Request
from csd.engine.resources.caches import Caches
from csd.engine.resources.model import EngineModel
from csd.engine.resources.sizes import Room
from csd.engine.resources.step_times import StepTimes
from csd.engine.results.result import Sample
from csd.engine.step.budget import Budget, StepTimeTable
from csd.engine.step.prefill import read_prompt
from csd.engine.step.step import Step
from csd.integrations.tensor_parallel.decoder import ParallelDecoder
from csd.integrations.tensor_parallel.link import FollowerStep, LeaderStep, Link, error_text
from csd.models.load import Loaded


class ParallelEngine(Engine):
    """A `csd.Engine` over the processes of `mesh`; all of them make the same calls.

    model: a whole `transformers` model, the same on every rank; it is split in place.
    mesh: one-dimensional; by default every process of the group, "nccl" on CUDA, "gloo" on CPU.
    options: as in `Engine`.

    Every rank gets the results of rank 0, which determines seed and drafts; `until` and `callback`
    run there only. Prompts, numbers of samples and sampling options must be the same on all ranks:
    ValueError names the first difference. A rank that fails raises its own error, and the others
    RuntimeError with that rank and error. Steps run one operation at a time, never from a captured
    graph.
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
            raise ValueError("static must be False: rank 0's decisions go over the host")
        if options.get("prefix_cache"):
            value = options["prefix_cache"]
            raise ValueError(f"prefix_cache must be False over several ranks, got {value!r}")
        fixed = {"static": False, "prefix_cache": False, "share_rows": False}
        super().__init__(loaded, **options | fixed)
        self.step_times = ParallelStepTimes(self.model, self.caches, link)

    def _make_caches(self, **sizes: Any) -> "ParallelCaches":
        return ParallelCaches(self.model, self.link, **sizes)

    def call_of(self, prompt: Any, arguments: Mapping[str, Any]) -> Call:
        """`Engine.call_of`, except that only rank 0 writes a recording."""
        call = super().call_of(prompt, arguments)
        if self.link.rank:
            call.record = None
        return call

    def run(
        self, requests: list[Request], settings: RunSettings, feed: Feed | None = None
    ) -> Generator[tuple[Request, Sample], None, None]:
        """`Engine.run`; ranks other than 0 yield rank 0's samples."""
        if feed is not None:
            raise ValueError("AsyncEngine must have an engine of one process, got a ParallelEngine")
        self.turn.check()
        refused = None
        if settings.verifier != "match":
            refused = NotImplementedError(
                f"verifier must be 'match' over several ranks, got {settings.verifier!r}"
            )
        asked = _of_one_rank(requests, settings)
        if asked:
            refused = NotImplementedError(f"{asked}: not supported over several ranks")
        self.link.meet(_shared_arguments(requests), refused)
        yield from self._follow(requests) if self.link.rank else self._lead(requests, settings)

    def refuse(self, error: Exception) -> None:
        """End the call with `error` also on the other ranks, which wait for this one."""
        if not self.turn.is_mine:
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
                    # slots and caches of other ranks may lag: the next call allocates new ones
                    self.caches.drop()

    def _end(self, requests: list[Request], error: Exception | None) -> None:
        if self.link.closed:
            return
        if error is not None:
            self.link.send("failed", error_text(error))
            return
        self.link.send("end", [(r.seed, r.result(), r.progress.stats) for r in requests])
        self.link.agree(None)

    def _follow(self, requests: list[Request]) -> Iterator[tuple[Request, Sample]]:
        with self.turn.lock, self.turn:
            done = self._execute_orders()
            for request, (seed, samples, stats) in zip(requests, done, strict=True):
                request.seed, request.progress.stats = seed, stats
                request.progress.waiting.clear()
                for sample in samples:
                    request.progress.finished[sample.index] = sample
                    yield request, sample

    def _execute_orders(self) -> list:
        """Execute rank 0's orders until its call ends; returns its (seed, samples, stats)."""
        pending_error: BaseException | None = None  # to be reported at the next order
        while True:
            order, what = self.link.receive()
            if order == "failed":
                raise pending_error or RuntimeError(f"rank 0 failed: {what}")
            try:
                if order == "prompt":
                    self._follow_prompt(pending_error, *what)
                elif order == "step":
                    step = self._following()
                    step.take(what, pending_error)
                    step(0, Budget(0))
                else:
                    self.link.agree(pending_error)
                    if order == "end":
                        return what
                    if order == "measure":
                        self.step_times.measure()
                    else:
                        self.caches.step = self.caches.allocate(*what)
            except BaseException as error:
                if self.link.closed:
                    raise
                pending_error = error

    def _follow_prompt(
        self,
        pending_error: BaseException | None,
        g: int,
        chunk: list[int],
        start: int,
        pages: torch.Tensor,
    ) -> None:
        with self.link.together(self.parts.exchanges(len(chunk), head=False)):
            if pending_error is not None:
                raise pending_error
            step = self._following()
            step.cache.prompt_pages[g] = pages
            read_prompt(step, g, chunk, start)

    def _following(self) -> "FollowerStep":
        step = self.caches.step
        if not isinstance(step, FollowerStep):
            raise RuntimeError(
                f"rank {self.link.rank} received a step before the sizes of its caches"
            )
        return step


class ParallelCaches(Caches):
    """Caches of which every rank allocates the same sizes, those that rank 0 decides."""

    def __init__(self, model: EngineModel, link: Link, **sizes: Any):
        self.link = link
        super().__init__(model, **sizes)

    def prepare(self, *args: Any, **options: Any) -> Step:
        before = self.step
        step = super().prepare(*args, **options)
        if step is not before:
            room = replace(Room.of(step.cache), pages=step.cache.pages)
            self.link.send("allocate", (room, step.slots.context.shape[1]))
            self.link.agree(None)
        return step

    def allocate(self, *sizes: Any, **options: Any) -> Step:
        step = super().allocate(*sizes, **options)
        values = {f.name: getattr(step, f.name) for f in fields(step)}
        if self.link.rank:
            return FollowerStep(**values | {"drafting": False}, link=self.link)
        return LeaderStep(**values, link=self.link)


class ParallelStepTimes(StepTimes):
    """Times that all ranks measure together and rank 0 uses."""

    def __init__(self, model: EngineModel, caches: Caches, link: Link):
        super().__init__(model, caches)
        self.link = link

    def measure(self, worth: float = math.inf, repeats: int = 3) -> StepTimeTable:
        # worth=inf: no rank leaves passes out because of its own times, so all run the same ones
        if not self.link.rank:
            self.link.send("measure", None)
            self.link.agree(None)
        return super().measure(math.inf, repeats)


def _of_one_rank(requests: list[Request], settings: RunSettings) -> str | None:
    """Name of the first option in use that csd does not support over several ranks, or None."""
    for request in requests:
        for name in RULES:
            if getattr(request.params, name) != request.params.DEFAULTS[name]:
                return name
        if request.progress.scores is not None:
            return "prompt_logprobs"
    return None if settings.forcing is None else "scoring"


def _shared_arguments(requests: list[Request]) -> dict[str, Any]:
    """Arguments that must be equal on all ranks, by name; prompts as a checksum."""
    prompts = "|".join(str(r.prompt) for r in requests)
    shared: dict[str, Any] = {"the number of prompts": len(requests)}
    shared["the prompts' checksum"] = zlib.crc32(prompts.encode())
    if requests:
        samples = requests[0].samples
        shared |= {"num_samples": len(samples), "first_sample": samples.start}
        shared |= vars(requests[0].params)
    return shared
