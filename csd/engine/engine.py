"""The engine: a model, its slots and caches, and the calls that run over them."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import count
from typing import Any, Literal, Unpack, overload

import torch

from csd.engine.call import Call, RunSettings
from csd.engine.carry import Carrying, every
from csd.engine.feed import Feed
from csd.engine.first_call import prepare_first_call
from csd.engine.model_resources import ModelResources
from csd.engine.options import Options
from csd.engine.options.checks import (
    check_device,
    check_drafter,
    check_dtype,
    check_revision,
    check_tokenizer,
)
from csd.engine.options.signature import shows
from csd.engine.requests import Request, check_served
from csd.engine.result import Sample, Samples
from csd.engine.scheduler import Scheduler
from csd.engine.slot_filler import clear
from csd.schema.arguments import check_flag, check_number, check_whole
from csd.schema.other_names import names_arguments
from csd.state.device import current, on_device, stream_of
from csd.state.forks import watch_forks
from csd.state.phases import preparation, showing

# of the int32 index of a step's rows, and of what a step's sizes take to time, far more than pay
MOST_SLOTS = 4096
# each step behind is one more that finished samples take
MOST_LAG = 64

# the kinds a type checker can distinguish; a tensor is one prompt or many
OnePrompt = str | list[int] | list[dict[str, str]] | list[dict[str, Any]]
ManyPrompts = list[str] | list[list[int]] | list[list[dict[str, str]]]


class Engine(ModelResources):
    """Draws samples from one model; calls on one engine run one after another.

    model: a `transformers` model, a local folder, a hub name, a GGUF file, a `csd.models` Decoder,
        or a `Loaded` with anything that has a decoder's `config`, `forward` and `logits`.
    dtype: of a model that is loaded by name; by default its checkpoint's on a GPU and on a CPU that
        multiplies bfloat16 (float32 in place of float16 there), else float32.
    max_slots: samples in flight at most, up to 4096; fewer where memory is short.
    memory: share of the free memory that caches and a step's rows may take, in (0, 1].
    prefill_chunk: prompt tokens read at once. A prompt that is longer, when samples are in flight,
        is read a chunk between two of their steps.
    kernels: "reference", "cpu" or "triton", a backend (`csd.backends`); by default what fits the
        device and the dtype. `engine.ops.name` is what was taken.
    static: whether steps have fixed shapes and never read the device, as CUDA graphs need; by
        default on a GPU. Drafters that read the device and other verifiers than "match" run
        without.
    lag: steps the host stays behind the device, at most 64, by default 1 where steps are static.
        Results do not depend on it.
    together: samples of a prompt in flight at once, at most, while other prompts wait; by default
        a quarter of them. Those that come later draft from finished ones. Results do not depend on
        it, but for the order in which samples finish.
    self_check: whether the first engine on a GPU checks its kernels there, as `csd doctor` does,
        before a model is loaded: about a minute, once for each machine, version, dtype and size of
        heads and vocabulary. Raises RuntimeError where one is wrong.
    decoder: "auto" runs csd's fused decoder where it has the family and the module is plain, else
        the module itself, with a warning that names why; "fused" and "module" run one or raise.
        `engine.decoder.name` is what was taken, `engine.decoder.why` what ruled out the fused one.
        See docs/models.md.
    exact: whether tokens and log-probabilities have the same bits whatever is drafted and batched,
        in bfloat16, float16 and float32. By default where that takes no time, as in bfloat16 on
        CPUs that multiply it; `engine.exact` is what was taken. On a GPU products are Triton's, or
        with "cublas" cuBLAS's in blocks of 64 rows. See docs/exact.md.
    """

    @names_arguments
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
        drafter: str | Callable = "consensus",
        kernels: str | None = None,
        static: bool | None = None,
        lag: int | None = None,
        together: int | None = None,
        self_check: bool = True,
        exact: bool | Literal["cublas"] | None = None,
        decoder: str = "auto",
    ):
        max_slots = check_whole("max_slots", max_slots, 1, MOST_SLOTS)
        prefill_chunk = check_whole("prefill_chunk", prefill_chunk, 1)
        together = None if together is None else check_whole("together", together, 1)
        lag = None if lag is None else check_whole("lag", lag, 0, MOST_LAG)
        memory = check_number("memory", memory, 0, 1, above=True)
        static = None if static is None else check_flag("static", static)
        self_check = check_flag("self_check", self_check)
        if not isinstance(exact, str) and exact is not None:
            exact = check_flag("exact", exact)
        drafter = "consensus" if drafter is None else drafter
        for check, value in (
            (check_drafter, drafter), (check_tokenizer, tokenizer), (check_device, device),
            (check_dtype, dtype), (check_revision, revision),
        ):  # fmt: skip
            check(value)
        self._load(
            model, kernels, exact, static, self_check, dtype=dtype, device=device,
            revision=revision, tokenizer=tokenizer, decoder=decoder,
        )  # fmt: skip
        self.max_slots = max_slots
        self.memory = memory
        self.prefill_chunk = prefill_chunk
        self.together = together
        self._default_drafter: Any = drafter
        self._drafter_name: Any = drafter
        self.lag = int(self.static) if lag is None else lag
        self._lock = threading.Lock()
        self._busy: int | None = None  # the thread that holds the lock, or the last one that did
        self._ended = True  # whether the last call's slots and pages are free again
        self._last: torch.cuda.Event | None = None  # when the last call's work was done
        self._group_keys = count(1)  # never reused, by any call
        watch_forks(self)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def warmup(
        self, *, num_samples: int = 16, prompt_tokens: int = 512, max_new_tokens: int = 512
    ) -> None:
        """Prepare first calls: caches, compiled kernels or loops, and step times.

        On a GPU also the graphs of all pool sizes, with and without drafts. Calls of at most these
        sizes then capture and allocate nothing, but for options that change what a step computes,
        as constraints and `top_logprobs` do. Raises as `generate` does.
        """
        prepare_first_call(self, num_samples, prompt_tokens, max_new_tokens)

    def prepare(self, prompt: Any, **options: Unpack[Options]) -> Call:
        """A call with its arguments checked, for `draw`. Raises as `generate` does."""
        try:
            own = None if options.get("tokenizer") is not None else self.tokenizer
            return Call.read(prompt, options, self.config, self.generation_config, own)
        except Exception as error:
            self.refuse(error)
            raise

    def draw(self, call: Call) -> Generator[tuple[Request, Sample], None, None]:
        """Run a call; yields each sample as it finishes."""
        run = self.run([r for r in call.requests if r.error is None], call.settings)
        try:
            self._open(call)
            for request, sample in run:
                call.finish_sample(request, sample)
                yield request, sample
        finally:
            every([run.close, call.close])

    def _open(self, call: Call) -> None:
        self._not_within_a_stream()
        try:
            call.open()
        except Exception as error:
            self.refuse(error)
            raise

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
        """`csd.generate` on this engine.

        {options}
        """
        call = self.prepare(prompt, **options)
        with Carrying(call.requests, call.many):
            try:
                for _ in self.draw(call):
                    pass
            except KeyboardInterrupt:
                pass
            results = call.results()
        return results if call.many else results[0]

    @shows(Options)
    def stream(
        self, prompt: Any, **options: Unpack[Options]
    ) -> Generator[tuple[int, Sample], None, None]:
        """`csd.stream` on this engine.

        {options}
        """
        return self._indexed(self.prepare(prompt, **options))

    def _indexed(self, call: Call) -> Generator[tuple[int, Sample], None, None]:
        # a generator of its own: the arguments are checked before it, and to close it ends the run
        with Carrying(call.requests, call.many), closing(self.draw(call)) as drawn:
            for request, sample in drawn:
                yield request.index, sample

    def run(
        self, requests: list[Request], settings: RunSettings, feed: Feed | None = None
    ) -> Generator[tuple[Request, Sample], None, None]:
        """Draw the samples of `requests`; yields each sample as it finishes.

        Closing the iterator cancels what is left. `requests` keep what was drawn until then.
        feed: brings requests while the engine runs.
        """
        self._not_within_a_stream()
        if not requests and feed is None:
            return
        with self._lock:
            self._busy = threading.get_ident()
            if not self._ended:
                # the last call was interrupted once more while it was being ended
                self._drop()
            self._ended = False
            stream = stream_of(self.device)
            if stream is not None and self._last is not None:
                # the last call may have been made on another one
                stream.wait_event(self._last)
            with current(self.device):
                if self._loaded.refresh():
                    self._take(self._loaded)
                self._begin_call(requests)
                check_served(requests, self.decoder.config)
                drafter = settings.drafter or self._default_drafter
                nodes = settings.budget if settings.speculate else 0
                given = nodes if isinstance(nodes, int) else 0
                if feed is None:
                    step = self._prepare(requests, drafter, settings.share, given)
                else:
                    step = feed.prepare(self, drafter, given)
            if settings.speculate:
                self._fit_history(requests, settings.share)
            tokenizer = self.tokenizer if settings.tokenizer is None else settings.tokenizer
            step = self._step_of_call(step, requests, settings, tokenizer)
            try:
                before = preparation()
                with current(self.device), showing(settings.progress):
                    budget = self._budget(settings, step)
                for kind, seconds in preparation().items():
                    step.seconds[kind] += seconds - before[kind]
                make: Callable[..., Scheduler] = Scheduler if feed is None else feed.scheduler
                scheduler = make(
                    step, requests, settings,
                    budget=budget,
                    tokenizer=tokenizer,
                    prefill_chunk=self.prefill_chunk,
                    together=self.together,
                    lag=self.lag,
                    group_keys=self._group_keys,
                )  # fmt: skip
                yield from on_device(scheduler.run(), self.device)
            finally:
                with current(self.device, stream):
                    clear(step)
                    self._end_call(requests)
                self._ended = True
                self._last = None if stream is None else stream.record_event()

    def refuse(self, error: Exception) -> None:
        """Called when a call of this engine is refused for its arguments."""

    def _in_my_call(self) -> bool:
        """True if this thread is within a call of this engine."""
        return self._lock.locked() and self._busy == threading.get_ident()

    def after_fork(self) -> None:
        # what a call of another thread has begun is dropped by the next call
        if not self._in_my_call():
            self._lock = threading.Lock()

    def _not_within_a_stream(self) -> None:
        if self._in_my_call():
            raise RuntimeError("this engine is in the middle of a stream; close that one first")
