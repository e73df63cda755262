"""The current model of an engine, with the operations that run it.

The step of a call is the engine's step with the call's verifier, rules and records.
"""

import os
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch

from csd.engine.call import RunSettings
from csd.engine.first_call.check import require_check
from csd.engine.requests.request import Request
from csd.engine.resources.caches import Resources
from csd.engine.resources.weights import logits_digest, tensor_versions, weights_state
from csd.engine.results.stats import shared_ngrams
from csd.engine.rules.changes import Changes, log_uncaptured
from csd.engine.step.budget import Controller
from csd.engine.step.static_step import StaticStep
from csd.engine.step.step import Step
from csd.kernels.backends import choose
from csd.kernels.ops import Ops, exact_triton
from csd.models.exact import choose_exact
from csd.models.exact_products import ExactProducts
from csd.models.fused.config import ModelSizes
from csd.models.fused.decoder import Decoder
from csd.models.load import Loaded, load
from csd.models.module.decoder import ModuleDecoder
from csd.state.kv_cache import KVCache
from csd.utils.device import peak_bytes
from csd.utils.phases import phase
from csd.utils.torch_state import plain_torch
from csd.verify.multi_draft import MultiDraftVerifier
from csd.verify.teacher_forcing import TeacherForcing


def step_of_call(
    step: Step,
    requests: Sequence[Request],
    settings: RunSettings,
    drafter: Any,
    tokenizer: Any,
    before: Changes | None,
) -> Step:
    """Returns `step` with the settings of a call, over the same memory.

    before: row changes of earlier calls, whose tensors are reused if they fit.
    """
    drafter.start_call()
    verifier: MultiDraftVerifier | TeacherForcing | None = None
    # without drafts, or if sampling is greedy, every verifier just samples the target
    drawn = settings.speculate and settings.verifier != "match"
    if drawn and not requests[0].params.greedy:
        verifier = MultiDraftVerifier(settings.verifier, drafter, step.ops)
    elif settings.forcing is not None:
        verifier = settings.forcing(step.ops, step.cache.rows)
    ops = step.ops
    if verifier is not None:
        step, ops = _dynamic(step), replace(ops, verify=verifier.verify)
    vocab, static = step.decoder.config.vocab, isinstance(step, StaticStep)
    changes = Changes.of_call(requests, step.slots, vocab, before, static, tokenizer)
    if changes is not None:
        changes.teacher_forced = isinstance(verifier, TeacherForcing)
    if changes is not None and changes.asked.host and static:
        log_uncaptured(step.slots.live.device)
        step = _dynamic(step)
        changes.static = False
    return replace(
        step,
        ops=ops,
        drafter=drafter,
        verifier=verifier,
        changes=changes,
        drafting=settings.speculate,
        top=settings.record_top,
        trees=settings.drafts,
        measures=settings.measures,
        seconds=step.no_seconds(),
    )


def _dynamic(step: Step) -> Step:
    """The same step with shapes that depend on the live slots."""
    if not isinstance(step, StaticStep):
        return step
    return Step(step.decoder, None, step.cache, step.slots, step.ops)


class ModelResources(Resources):
    """A model with its caches and operations; base class of `Engine`."""

    exact: bool
    _exact: Any  # this and the next two: the engine's arguments
    _static: bool | None
    _kernels: str | None
    _products: ExactProducts
    _loaded: Loaded
    _cost_of: tuple | None  # config, device and dtype for which steps were timed

    @plain_torch()
    def _load(
        self,
        model: Any,
        kernels: str | None,
        exact: bool | Literal["cublas"] | None,
        static: bool | None,
        self_check: bool,
        **options: Any,
    ) -> None:
        """Load a model and choose its operations; the arguments are those of `Engine`.

        options: those of `csd.models.load.load`.
        """
        checked = not self_check

        def check_kernels(on: torch.device, kind: torch.dtype, config: ModelSizes) -> None:
            nonlocal checked
            if not checked and on.type == "cuda" and kernels != "reference":
                # Triton's kernels are exact only if `exact` requests it
                require_check(on, kind, config, bool(exact))
                checked = True

        by_name = isinstance(model, str | os.PathLike)
        with phase(f"loading {model}", None) if by_name else nullcontext():
            loaded = load(model, before=check_kernels, **options)
        self._exact, self._static = exact, static
        self._cost_of = self._cost = None
        self._kernels, self.dtype = kernels, loaded.dtype
        self._ops = choose(kernels, loaded.device, loaded.dtype)
        self._products = ExactProducts.for_kernels(self._ops.name, exact)
        self.take(loaded)
        if self.exact and self._ops.name == "triton":
            self._ops = exact_triton()
        check_kernels(self.device, self.dtype, self.decoder.config)

    def take(self, loaded: Loaded) -> None:
        """Run another loaded model from now on, and drop the caches; called between two calls."""
        self._loaded = loaded
        if loaded.dtype != self.dtype and loaded.device.type == "cpu":
            # the module was cast, and loops exist for some dtypes only
            self._ops = choose(self._kernels, loaded.device, loaded.dtype)
        self.static = self._whether_static(loaded)
        self.decoder, self.exact = choose_exact(self._exact, loaded, self._ops.name, self._products)
        self.device, self.dtype = loaded.device, loaded.dtype
        self._drop()
        timed = self.decoder.config, self.device, self.dtype
        if timed != self._cost_of:
            # steps of other sizes take other times
            self._cost_of, self._cost = timed, None

    def _whether_static(self, loaded: Loaded) -> bool:
        """True if steps have fixed shapes. Raises ValueError if static=True is impossible."""
        name, on_gpu = self._ops.name, loaded.device.type == "cuda"
        if self._static and on_gpu and name == "reference":
            raise ValueError("static must be False with kernels='reference' on a GPU, got True")
        # the reference operations read the device
        static = on_gpu and name == "triton" if self._static is None else self._static
        if isinstance(loaded.decoder, ModuleDecoder):
            why = loaded.decoder.why_not_static if static else None
            if why is not None and self._static:
                raise ValueError(f"static must be False for this module, got True: {why}")
            static = static and why is None
            loaded.decoder.capture(static)
        return static

    def leave_model(self) -> None:
        """Hold the user's module weakly from now on, as a cache of engines by module must."""
        self._loaded.held = None

    @property
    def kernels(self) -> str | None:
        """Name of the requested backend; None: chosen by device and dtype."""
        return self._kernels

    @property
    def module(self) -> Any:
        """The user's module that the engine was made of; None without one."""
        return self._loaded.current_module()

    def load(self, folder: str) -> Loaded:
        """The weights of a folder in the engine's dtype and on its device, for `take`; with the
        folder's tokenizer, or the engine's if it has none."""
        loaded = load(folder, dtype=self.dtype, device=self.device, decoder=self._loaded.wanted)
        if loaded.tokenizer is None:
            loaded.tokenizer = self.tokenizer
        return loaded

    def tensor_versions(self, begun: bool = False) -> Hashable:
        """`csd.engine.resources.weights.tensor_versions` of the current model."""
        return tensor_versions(self._loaded, begun)

    def fingerprint(self) -> str:
        """A digest of logits (`logits_digest`), the dtype, and "exact" or "rounding".

        Equal fingerprints mean equal weights, dtype and arithmetic, whatever file the weights came
        from. Called while no call runs.
        """
        with torch.inference_mode(False):
            step = self._allocate(1, 1, 1, 1, 1)
        kind = "exact" if self.exact else "rounding"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"csd-{logits_digest(step)}-{dtype}-{kind}"

    @property
    def ops(self) -> Ops:
        """Operations of the engine's steps; assigning others drops the step and its caches."""
        return self._ops

    @ops.setter
    def ops(self, ops: Ops) -> None:
        self._ops = ops
        self._drop()

    @property
    def config(self) -> ModelSizes:
        """Current sizes and context of the model. Raises if csd no longer supports it."""
        return self._loaded.current_config()

    @property
    def generation_config(self) -> Any:
        """The model's current generation config."""
        return self._loaded.current_generation_config()

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer argument, else the one in the model's folder; None without one."""
        return self._loaded.own_tokenizer()

    def release(self) -> None:
        """Free the caches. The engine remains usable and allocates new ones."""
        self._drop()
        if self.device.type == "cuda":
            # other processes cannot use the memory of freed tensors that torch keeps
            torch.cuda.empty_cache()

    def _begin_call(self, requests: list[Request]) -> None:
        if isinstance(self._loaded.decoder, ModuleDecoder | Decoder):
            self._loaded.decoder.begin_call()
        for request in requests:
            request.stats.decoder = getattr(self.decoder, "name", "own")
            request.stats.fused_ruled_out = getattr(self.decoder, "why", None)

    def _check_prefix_cache(self, cache: KVCache) -> None:
        """Drop the units of prompts that the current weights, adapters or settings did not read."""
        index = cache.allocator.index
        if index is None:
            return
        key = weights_state(self._loaded, begun=True), self.prefill_chunk, torch.get_num_threads()
        if key != index.key:
            cache.allocator.forget_all()
            index.key = key

    def _step_of_call(
        self, step: Step, requests: list[Request], settings: RunSettings, tokenizer: Any
    ) -> Step:
        """The engine's step with the settings of this call, over the same memory."""
        configured = step_of_call(step, requests, settings, self._drafter, tokenizer, self._changes)
        self._changes = configured.changes or self._changes
        return configured

    def _end_call(
        self, requests: list[Request], seconds: dict[str, float], control: Controller | None = None
    ) -> None:
        """Write the statistics of the whole call into those of each request.

        control: of the call's automatic budget.
        """
        dropped, peak = self._newly_dropped(requests), peak_bytes(self.device)
        tokens = sum(request.stats.tokens for request in requests)
        for request in requests:
            request.stats.seconds = dict(seconds)
            request.stats.call_tokens = tokens
            request.stats.peak_memory = peak
            request.stats.contexts_dropped = dropped
            if control is not None:
                _explain_drafts(request, control)


# most samples, and most tokens of each, whose n-grams are compared
COMPARED, BEGINNING = 64, 2048


def _explain_drafts(request: Request, control: Controller) -> None:
    """Write the gain of a call's drafts, and where they did not pay the reasons, to the stats."""
    stats, gain = request.stats, control.gain
    stats.draft_gain, stats.slots, stats.double_cost = gain.ratio, gain.live, control.double_cost
    if stats.draft_gain is not None and not stats.pays and len(request.finished) > 1:
        samples = list(request.finished.values())[:COMPARED]
        stats.shared_ngrams = shared_ngrams([x.tokens[:BEGINNING] for x in samples])
