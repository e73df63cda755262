"""The engine: a model, its slots and caches, and the calls that run over them.

A call draws the samples of its own requests, or of those that arrive while it runs (`Feed`).
`Engine.warmup` prepares first calls, with caches, graphs, compiled code and step times.
"""

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, count
from typing import Any, Protocol, Unpack, overload

import torch

from csd.engine.call import Call, RunSettings
from csd.engine.options import Options, read_options
from csd.engine.options.engine_arguments import EngineOptions, WarmupOptions
from csd.engine.options.show import shows
from csd.engine.plan import StepPolicy
from csd.engine.policy import CallPolicy
from csd.engine.requests.request import Carrying, Request, check_served, every
from csd.engine.resources.caches import Caches
from csd.engine.resources.model import EngineModel
from csd.engine.resources.step_times import StepTimes
from csd.engine.resources.turn import Turn
from csd.engine.results.result import Sample, Samples
from csd.engine.rules.changes import Changes, log_uncaptured
from csd.engine.scheduler import Scheduler
from csd.engine.session import Session
from csd.engine.slots import HostSlots, clear
from csd.engine.step.budget import Controller
from csd.engine.step.static_step import StaticStep, capture_all, dynamic
from csd.engine.step.step import Step
from csd.engine.step.thread_choice import ThreadChoice
from csd.graph.drafter import Verifier
from csd.graph.registry import make_verifier
from csd.graph.teacher_forcing import TeacherForcing
from csd.kernels.ops import Ops
from csd.models.fused.config import ModelSizes
from csd.models.fused.decoder import DecoderLike
from csd.models.fused.held import held_weights
from csd.models.load import Loaded
from csd.utils.arguments import check_whole, default_of
from csd.utils.device import current, on_device, peak_bytes
from csd.utils.phases import preparation, showing
from csd.utils.torch_state import in_plain_torch, plain_torch


class Feed(Protocol):
    """Protocol of a source of requests that arrive while an engine runs."""

    def prepare(self, engine: Any, drafter: Any, nodes: int) -> Step:
        """Returns the engine's step, over caches of the feed's sizes.

        nodes: drafted tokens per step if the budget is a number, else 0.
        """

    def policy(self) -> StepPolicy:
        """Returns the policy of a run, whose requests arrive between steps."""


# kinds that a type checker can distinguish; a tensor is one prompt or several
OnePrompt = str | list[int] | list[dict[str, str]] | list[dict[str, Any]]
ManyPrompts = list[str] | list[list[int]] | list[list[dict[str, str]]]


# all engines that exist, for `engines_of`
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
# engines may be made in another thread
_engines_lock = threading.Lock()


def engines_of(module: Any) -> list["Engine"]:
    """Engines that were made of a user's module and still exist."""
    with _engines_lock:
        engines = list(_engines)
    return [engine for engine in engines if engine.module is module]


@shows(EngineOptions)
class Engine:
    """Draws samples from one model; calls on one engine run one after another.

    model: a `transformers` model, a local folder, a hub name, a GGUF file, a `csd.models` Decoder,
        or a `Loaded` with anything that has a decoder's `config`, `forward` and `logits`.
        `engine.decoder.name` is the decoder in use, `engine.decoder.why` the reason against the
        fused one (docs/models.md).

    {options}
    """

    def __init__(self, model: Any, **options: Unpack[EngineOptions]):
        asked = read_options(options, EngineOptions)
        loading = ("dtype", "device", "quantization", "revision", "tokenizer", "decoder")
        of_model = ("kernels", "exact", "static", "self_check", *loading)
        drafter, lag = asked["drafter"] or default_of(EngineOptions, "drafter"), asked["lag"]
        self.model = EngineModel(model, **{name: asked[name] for name in of_model})
        of_caches = ("max_slots", "memory", "prefill_chunk", "prefix_cache", "share_rows")
        self.caches = self._make_caches(**{name: asked[name] for name in of_caches})
        self.step_times = StepTimes(self.model, self.caches)
        self.together = asked["together"]
        self.lag = int(self.static) if lag is None else lag
        self._default_drafter: Any = drafter
        self.turn = Turn(self.model)
        self._ended = True  # whether the last call's slots and pages have been freed
        self._threads = ThreadChoice(fixed=self.device.type != "cpu")
        self._group_keys = count(1)  # of the groups of all calls, never reused
        with _engines_lock:
            _engines.add(self)

    def _make_caches(self, **sizes: Any) -> Caches:
        return Caches(self.model, **sizes)

    @property
    def decoder(self) -> DecoderLike:
        """The decoder in use."""
        return self.model.decoder

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def exact(self) -> bool:
        """True if bits are independent of drafts and batch."""
        return self.model.exact

    @property
    def exact_on(self) -> str | None:
        """Machines on which bits are the same: "every x86 CPU", "this kind of CPU" or "this kind of
        GPU"; None if `exact` is false. See docs/portable.md."""
        return self.model.exact_on

    @property
    def static(self) -> bool:
        """True if steps have fixed shapes."""
        return self.model.static

    @property
    def ops(self) -> Ops:
        """Operations of the engine's steps; assigning others drops the step and its caches."""
        return self.model.ops

    @ops.setter
    def ops(self, ops: Ops) -> None:
        self.model.ops = ops
        self.caches.drop()

    @property
    def config(self) -> ModelSizes:
        """Current sizes and context of the model. Raises if csd no longer supports it."""
        return self.model.loaded.current_config()

    @property
    def generation_config(self) -> Any:
        """The model's current generation config."""
        return self.model.loaded.current_generation_config()

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer argument, else the one in the model's folder; None without one."""
        return self.model.loaded.own_tokenizer()

    @property
    def module(self) -> Any:
        """The user's module that the engine was made of; None without one."""
        return self.model.loaded.current_module()

    @property
    def max_slots(self) -> int:
        """Most samples in flight."""
        return self.caches.max_slots

    @property
    def captured(self) -> dict:
        """CUDA graphs of the steps, by pool size and operation; empty on a CPU."""
        step = self.caches.step
        return step.captures.graphs if isinstance(step, StaticStep) else {}

    def __repr__(self) -> str:
        """The model's family, its dtype, device, decoder and weights, and the number of slots."""
        family = getattr(self.decoder.config, "family", type(self.decoder).__name__)
        dtype = str(self.dtype).removeprefix("torch.")
        decoder = getattr(self.decoder, "name", "own")
        held = held_weights(self.decoder)
        weights = "" if held is None else f" (weights: {held})"
        return (
            f"<csd.Engine of {family} in {dtype} on {self.device}, {decoder} decoder{weights}, "
            f"up to {self.max_slots} samples at once>"
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    @shows(WarmupOptions)
    def warmup(self, **options: Unpack[WarmupOptions]) -> None:
        """Prepare first calls: allocate caches, compile kernels or loops, and time steps.

        On a GPU also capture the graphs of all pool sizes, with and without drafts. Calls of at
        most these sizes then capture and allocate nothing, except for options that change the
        computation of a step, such as constraints and `top_logprobs`. Raises as `generate` does.

        {options}
        """
        sizes = read_options(options, WarmupOptions)
        max_new_tokens = sizes["max_new_tokens"]
        asked: dict[str, Any] = dict(num_samples=sizes["num_samples"], seed=0, ignore_eos=True)
        # a prompt of one token would be read by the first step only, without a prefill
        tokens = check_whole("prompt_tokens", sizes["prompt_tokens"], 2, self.config.context - 1)
        prompt = [0] * tokens
        call = self.prepare(prompt, max_new_tokens=max_new_tokens, **asked)
        # allocate caches of the requested sizes, which the short call below reuses
        with self.between_calls():
            clear(self.caches.prepare(call.requests, self._default_drafter))
        self.generate(prompt, max_new_tokens=min(2, max_new_tokens), **asked)
        with self.between_calls():
            step = self.caches.prepare(call.requests, self._default_drafter)
            capture_all(self._with_settings(step, call.requests, call.settings, self.tokenizer))
            clear(step)

    def prepare(self, prompt: Any, **options: Unpack[Options]) -> Call:
        """Check the arguments of a call and return it for `draw`. Raises as `generate` does."""
        return self.call_of(prompt, options)

    def call_of(self, prompt: Any, arguments: Mapping[str, Any]) -> Call:
        """Returns the call of arguments as a mapping, which may have been read before."""
        try:
            options = read_options(arguments)
            own = None if options["tokenizer"] is not None else self.tokenizer
            return Call.read(prompt, options, self.config, self.generation_config, own)
        except Exception as error:
            self.refuse(error)
            raise

    def draw(self, call: Call) -> Generator[tuple[Request, Sample], None, None]:
        """Run a call; yields each sample as it finishes."""
        run = self.run([r for r in call.requests if r.progress.error is None], call.settings)
        try:
            self.turn.check()
            try:
                call.open()
            except Exception as error:
                self.refuse(error)
                raise
            if call.is_recorded:
                receipt = self.model.receipt()
                for request in call.requests:
                    request.receipt = receipt
            for request, sample in run:
                if call.bar is not None:
                    call.bar.end_sample(request, sample)
                yield request, sample
        finally:
            every([run.close, call.close])

    @overload
    def generate(self, prompt: OnePrompt, **options: Unpack[Options]) -> Samples: ...
    @overload
    def generate(self, prompt: ManyPrompts, **options: Unpack[Options]) -> list[Samples]: ...
    @overload
    def generate(
        self, prompt: torch.Tensor, **options: Unpack[Options]
    ) -> Samples | list[Samples]: ...
    @shows(Options)
    def generate(self, prompt: Any, **options: Unpack[Options]) -> Samples | list[Samples]:
        """Run `csd.generate` on this engine.

        {options}
        """
        return self.results(self.prepare(prompt, **options))

    def results(self, call: Call) -> Samples | list[Samples]:
        """Run a call to its end; returns what `generate` returns."""
        with Carrying(call.requests, call.many):
            for _ in self.draw(call):
                pass
            results = call.results()
        return results if call.many else results[0]

    def session(self, prompt: Any, *, num_samples: int = 1, seed: int | None = None) -> Session:
        """Begin `num_samples` texts with a prompt, to be continued in turns (`Session.sample`).

        prompt, seed: as in `generate`, whose samples are those of the first turn.
        """
        return Session(self, prompt, num_samples, seed)

    @shows(Options)
    def stream(
        self, prompt: Any, **options: Unpack[Options]
    ) -> Generator[tuple[int, Sample], None, None]:
        """Run `csd.stream` on this engine.

        {options}
        """
        return self.samples(self.prepare(prompt, **options))

    def samples(self, call: Call) -> Generator[tuple[int, Sample], None, None]:
        """Run a call; yields what `stream` yields. Closing the generator ends the run."""
        with Carrying(call.requests, call.many), closing(self.draw(call)) as drawn:
            for request, sample in chain(call.refused(), drawn):
                yield request.index, sample

    @in_plain_torch
    def run(
        self, requests: list[Request], settings: RunSettings
    ) -> Generator[tuple[Request, Sample], None, None]:
        """Draw the samples of `requests`; yields each sample as it finishes.

        Closing the iterator cancels unfinished samples; `requests` keep their tokens so far.
        """
        if requests:
            yield from self._run(requests, settings)

    @plain_torch()
    def serve(self, settings: RunSettings, feed: Feed) -> None:
        """Draw the samples of requests that a feed has while the engine runs."""
        for _ in self._run([], settings, feed):
            pass

    def _run(
        self, requests: list[Request], settings: RunSettings, feed: Feed | None = None
    ) -> Generator[tuple[Request, Sample], None, None]:
        self.turn.check()
        with self.turn.lock, self.turn as stream:
            tokenizer = self.tokenizer if settings.tokenizer is None else settings.tokenizer
            with current(self.device):
                step = self._begin_call(requests, settings, feed)
                step = self._with_settings(step, requests, settings, tokenizer)
            control: Controller | None = None
            try:
                before = preparation()
                with current(self.device), showing(settings.progress):
                    budget = self.step_times.budget(settings, step)
                for kind, seconds in preparation().items():
                    step.seconds[kind] += seconds - before[kind]
                control = budget.control
                policy: StepPolicy = (
                    CallPolicy(requests, settings, self.together) if feed is None else feed.policy()
                )
                slots = HostSlots(
                    step,
                    tokenizer=tokenizer,
                    prefill_chunk=self.caches.prefill_chunk,
                    group_keys=self._group_keys,
                    arrive=feed is not None,
                )
                scheduler = Scheduler(
                    policy,
                    slots,
                    settings,
                    budget=budget,
                    lag=self.lag,
                    threads=self._threads,
                    expected=self.step_times.table or (lambda rows: 1.0),
                )
                yield from on_device(scheduler.run(), self.device)
            finally:
                with current(self.device, stream):
                    clear(step)
                    self._end_call(requests, step.seconds, control)
                self._ended = True

    def _begin_call(
        self, requests: list[Request], settings: RunSettings, feed: Feed | None
    ) -> Step:
        """Returns a step with caches for a call of the model as it is now."""
        if not self._ended:
            # the last call was interrupted again while it ended
            self.caches.drop()
        self._ended = False
        self._threads.fixed = self.device.type != "cpu" or not self.model.any_threads()
        self._threads.begin()
        if self.model.loaded.refresh():
            self.take(self.model.loaded)
        self.model.begin_call(requests)
        check_served(requests, self.decoder.config)
        drafter = settings.drafter or self._default_drafter
        nodes = settings.budget if settings.speculate else 0
        fixed_nodes = nodes if isinstance(nodes, int) else 0
        priors = settings.priors
        for prior in priors:
            prior.check(None, self.decoder.config.vocab)
        for request in requests if priors else []:
            request.progress.stats.prior_tokens = priors[0].tokens
        if feed is None:
            shared = settings.prior if priors else None
            step = self.caches.prepare(requests, drafter, shared, fixed_nodes)
        else:
            step = feed.prepare(self, drafter, fixed_nodes)
        for part, prior in enumerate(priors):
            self.caches.drafter.use_prior(prior, part)
        self.caches.forget_stale_units(step.cache)
        if settings.speculate:
            self.caches.fit_history(requests)
        return step

    def _with_settings(
        self, step: Step, requests: list[Request], settings: RunSettings, tokenizer: Any
    ) -> Step:
        """The engine's step with the settings of this call, over the same memory."""
        caches, ops = self.caches, step.ops
        caches.drafter.start_call()
        verifier: Verifier | None = None
        # without drafts, or if sampling is greedy, every verifier just samples the target
        drawn = settings.speculate and settings.verifier != "match"
        if drawn and not requests[0].params.greedy:
            verifier = make_verifier(settings.verifier, caches.drafter, ops)
        elif settings.forcing is not None:
            verifier = settings.forcing(ops, step.cache.rows)
        if verifier is not None:
            step, ops = dynamic(step), replace(ops, verify=verifier.verify)
        vocab, static = step.decoder.config.vocab, step.static
        changes = Changes.of_call(requests, step.slots, vocab, caches.changes, static, tokenizer)
        if changes is not None:
            caches.changes = changes
            changes.teacher_forced = isinstance(verifier, TeacherForcing)
            if changes.asked.host and static:
                log_uncaptured(self.device.type)
                step, changes.static = dynamic(step), False
        return replace(
            step,
            ops=ops,
            drafter=caches.drafter,
            verifier=verifier,
            changes=changes,
            drafting=settings.speculate,
            top=settings.record_top,
            trees=settings.drafts,
            measures=settings.measures,
            seconds=step.no_seconds(),
        )

    def _end_call(
        self, requests: list[Request], seconds: dict[str, float], control: Controller | None
    ) -> None:
        """Write the statistics of the whole call into those of each request.

        control: of the call's automatic budget.
        """
        dropped, peak = self.caches.newly_dropped(requests), peak_bytes(self.device)
        tokens = sum(request.progress.stats.tokens for request in requests)
        for request in requests:
            stats = request.progress.stats
            stats.seconds, stats.call_tokens = dict(seconds), tokens
            stats.peak_memory, stats.contexts_dropped = peak, dropped
            if control is not None:
                texts = (sample.tokens for sample in request.progress.finished.values())
                gain = control.gain
                stats.explain_drafts(gain.ratio, gain.live, control.double_cost, texts)

    def take(self, loaded: Loaded) -> None:
        """Run another loaded model from now on, and drop the caches; called between two calls."""
        self.model.take(loaded)
        self.caches.drop()

    def release(self) -> None:
        """Free the caches. The engine remains usable and allocates new ones."""
        self.caches.drop()
        if self.device.type == "cuda":
            # other processes cannot use the memory of freed tensors that torch keeps
            torch.cuda.empty_cache()

    @contextmanager
    def between_calls(self) -> Iterator[None]:
        """Context in which no call of the engine runs, on its device."""
        self.turn.check()
        with self.turn.lock, self.turn, current(self.device):
            yield

    def refuse(self, error: Exception) -> None:
        """Called with the error of a call whose arguments are refused."""
