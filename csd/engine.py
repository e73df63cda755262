"""The engine: a model, its slots and caches, and what a call needs of them."""

import threading
from collections.abc import Generator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, overload

import torch

from csd import arguments
from csd.budget import AutoBudget, AutoPool, FixedBudget, FixedPool
from csd.cache import PAGE, KVCache
from csd.cost import CostModel
from csd.device import current, on_device, stream_of
from csd.graph.drafters import make_drafter
from csd.job import Job, OnTokens, Until
from csd.kernels.ops import Ops
from csd.loop import Loop
from csd.memory import Demand, Sizes, free_bytes, peak_bytes, slots_that_fit
from csd.models.load import Loaded, load
from csd.result import Sample, Samples
from csd.slots import Slots
from csd.static_step import StaticStep, sizes_for
from csd.step import Step
from csd.time_steps import sizes_to_time, time_steps
from csd.verify.sampler import Sampler

if TYPE_CHECKING:
    from csd.generate import ManyPrompts, OnePrompt


class Engine:
    """Draws samples from one model; calls on one engine run one after another.

    model: a `transformers` model, a local folder, a hub name, a GGUF file, a `csd.models` Decoder,
        or a `Loaded` with anything that has a decoder's `config`, `forward` and `logits`.
    max_slots: samples in flight at most; fewer where memory is short.
    memory: share of the free memory that caches and a step's rows may take.
    prefill_chunk: prompt tokens read at once. A prompt that is longer, when samples are in flight,
        is read a chunk between two of their steps.
    kernels: "reference" or "triton"; by default the one that fits the device.
    static: whether steps have fixed shapes and never read the device, as CUDA graphs need; by
        default on a GPU. Other drafters than the consensus graph and other verifiers than "match"
        run without.
    lag: steps the host stays behind the device, by default 1 where steps are static. Results do
        not depend on it.
    together: samples of a prompt in flight at once, at most, while other prompts wait; by default
        a quarter of them. Those that come later draft from finished ones. Results do not depend on
        it, but for the order in which samples finish.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        max_slots: int = 64,
        memory: float = 0.9,
        prefill_chunk: int = 512,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        drafter: str = "consensus",
        kernels: str | None = None,
        static: bool | None = None,
        lag: int | None = None,
        together: int | None = None,
    ):
        arguments.whole("max_slots", max_slots, 1)
        arguments.whole("prefill_chunk", prefill_chunk, 1)
        if together is not None:
            arguments.whole("together", together, 1)
        if not 0 < memory <= 1:
            raise ValueError(f"memory must lie in (0, 1], got {memory!r}")
        loaded = load(model, dtype=dtype, device=device, revision=revision, tokenizer=tokenizer)
        self._take(loaded)
        self.tokenizer = loaded.tokenizer
        self.max_slots = max_slots
        self.memory = memory
        self.prefill_chunk = prefill_chunk
        self.together = together
        self._default_drafter = self._drafter_name = drafter
        self._ops = Ops.choose(kernels, self.device)
        on_gpu = self.device.type == "cuda"
        # the references read the device
        self.static = on_gpu and self._ops.name == "triton" if static is None else static
        if self.static and on_gpu and self._ops.name == "reference":
            raise ValueError("static must be False with kernels='reference' on a GPU, got True")
        self.lag = int(self.static) if lag is None else lag
        self._lock = threading.Lock()
        self._busy: int | None = None  # the thread whose call is running
        self._cost: CostModel | None = None
        self._last: torch.cuda.Event | None = None  # when the last call's work was done
        self._next_group = 0

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _take(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.decoder, self.config = loaded.decoder, loaded.config
        self.device, self.dtype = loaded.device, loaded.dtype
        self._drop()

    def _drop(self) -> None:
        self._step: Step | None = None
        self._drafter: Any = None

    @property
    def ops(self) -> Ops:
        """The operations of its steps; setting others makes a new step."""
        return self._ops

    @ops.setter
    def ops(self, ops: Ops) -> None:
        self._ops = ops
        self._drop()

    @property
    def captured(self) -> dict:
        """The CUDA graphs of its steps, by pool size and what they do; none on a CPU."""
        return self._step.captures.graphs if isinstance(self._step, StaticStep) else {}

    @property
    def generation_config(self) -> Any:
        """The model's, as it is now."""
        return self._loaded.current_generation_config()

    def release(self) -> None:
        """Give the caches back. The engine can still be used and makes new ones."""
        self._drop()
        if self.device.type == "cuda":
            # what torch keeps of freed tensors no other process can have
            torch.cuda.empty_cache()

    @overload
    def generate(self, prompt: "OnePrompt", **options: Any) -> Samples: ...
    @overload
    def generate(self, prompt: "ManyPrompts", **options: Any) -> list[Samples]: ...
    @overload
    def generate(self, prompt: torch.Tensor, **options: Any) -> Any: ...
    def generate(self, prompt: Any, **options: Any) -> Samples | list[Samples]:
        """As `csd.generate`, on this engine."""
        from csd.generate import generate

        return generate(self, prompt, **options)

    def run(
        self,
        jobs: list[Job],
        *,
        budget: str | int = "auto",
        speculate: bool = True,
        drafter: Any = None,
        verifier: str = "match",
        until: Until | None = None,
        on_tokens: OnTokens | None = None,
        record_top: bool = False,
        drafts: bool = False,
    ) -> Generator[tuple[Job, Sample], None, None]:
        """Draw the samples of `jobs`; yields each sample as it finishes.

        Closing the iterator cancels what is left. `jobs` keep what was drawn until then.
        """
        self._not_within_a_stream()
        with self._lock:
            stream = stream_of(self.device)
            if stream is not None and self._last is not None:
                # the last call may have been made on another one
                stream.wait_event(self._last)
            with current(self.device):
                if self._loaded.refresh():
                    self._take(self._loaded)
                step = self._prepare(jobs, drafter or self._default_drafter)
            step.drafter, step.sampler, step.drafting = self._drafter, None, speculate
            # without drafts, or without chance, every verifier samples the target
            if speculate and verifier != "match" and jobs[0].params.temperature > 0:
                step.sampler = Sampler(verifier, self._drafter, self._ops)
            if isinstance(step, StaticStep):
                step.top, step.trees = record_top, drafts
            loop = Loop(self, step, jobs, until, on_tokens, record_top, drafts)
            self._busy = threading.get_ident()
            try:
                with current(self.device):
                    rule = self._budget(budget, speculate, step)
                yield from on_device(loop.run(rule), self.device)
            finally:
                with current(self.device, stream):
                    loop.clear()
                self._last = None if stream is None else stream.record_event()
                peak = peak_bytes(self.device)
                for job in jobs:
                    job.stats.peak_memory = peak
                self._busy = None

    def _refused(self, error: Exception) -> None:
        """A call of this engine has been refused for its arguments."""

    def _not_within_a_stream(self) -> None:
        if self._busy == threading.get_ident():
            raise RuntimeError("this engine is in the middle of a stream; close that one first")

    def _budget(self, budget: str | int, speculate: bool, step: Step) -> FixedBudget | FixedPool:
        sizes = None
        if isinstance(step, StaticStep) and not step.sampler:
            sizes = sizes_for(step.slots.count)
        nodes = budget if speculate else 0
        if isinstance(nodes, int):
            return FixedPool(nodes, sizes) if sizes else FixedBudget(nodes)
        if self._cost is None:
            self._cost = self.measure_steps()
        return AutoPool(self._cost, sizes) if sizes else AutoBudget(self._cost)

    def _prepare(self, jobs: list[Job], drafter: Any) -> Step:
        """Caches large enough for `jobs`; those at hand are kept when they are."""
        if drafter != self._drafter_name:
            self._drafter_name = drafter
            self._drop()
        wanted = Sizes.of(jobs, self.max_slots)
        if self._step is not None:
            if wanted.fit(self._step.cache) and self._step.cache.k.dtype == self.dtype:
                return self._step
            # its memory counts as free below
            self._drop()

        def demand(slots: int) -> Demand:
            sizes = replace(wanted, slots=slots)
            return Demand.of(self.config, self.dtype, **asdict(sizes), rows=self._rows(slots))

        slots = slots_that_fit(demand, wanted.slots, int(self.memory * free_bytes(self.device)))
        sizes = replace(wanted, slots=slots)
        # what a call leaves for the next must not be of one caller's inference mode
        with torch.inference_mode(False):
            self._drafter = make_drafter(self._drafter_name, self._ops, self.device)
            tables = sizes.slot_pages, sizes.prompt_pages
            self._step = self._allocate(slots, *tables, sizes.pages, self._drafter.context)
        return self._step

    def _rows(self, slots: int) -> int:
        """Of the largest pool, and of a chunk of a prompt."""
        return max(self.prefill_chunk, slots + 512, sizes_for(slots)[-1])

    def _allocate(
        self, slots: int, slot_pages: int, prompt_pages: int, pages: int, context: int
    ) -> Step:
        """A step without a drafter, whose slots keep `context` tokens."""
        cache = KVCache(
            self.config,
            slots=slots,
            pages=pages,
            prompt_pages=prompt_pages,
            slot_pages=slot_pages,
            rows=self._rows(slots),
            dtype=self.dtype,
            device=self.device,
        )
        state = Slots.empty(
            slots,
            self.config.vocab,
            slot_pages * PAGE,
            context,
            torch.promote_types(self.dtype, torch.float32),
            self.device,
        )
        kind = StaticStep if self.static and self._drafter_name == "consensus" else Step
        return kind(self.decoder, None, cache, state, self._ops)

    def measure_steps(self) -> CostModel:
        """Seconds of forward and verify over a few pool sizes, on slots that hold nothing."""
        captured = self.static and self.device.type == "cuda"
        sizes = sizes_to_time(self.max_slots, captured)
        with torch.inference_mode(False):
            step = self._allocate(sizes[-1], 1, 1, 1, 1)
        return time_steps(step, sizes, captured)

    def new_group_key(self) -> int:
        """Never used before, by any call."""
        self._next_group += 1
        return self._next_group
