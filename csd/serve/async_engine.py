"""`csd.AsyncEngine`: an engine that accepts requests while it runs.

A request's arguments are read and checked in the caller's thread; the engine's own thread draws.
"""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar, Unpack

from csd.engine.call import Call, RunSettings
from csd.engine.engine import Engine, OnePrompt
from csd.engine.options import SAMPLING, Options, read_options
from csd.engine.options.engine_arguments import ServiceOptions, SharedOptions
from csd.engine.options.grammar import has_grammar, matcher_of
from csd.engine.options.show import shows
from csd.engine.requests.request import Request
from csd.engine.resources.sizes import ServedSizes
from csd.engine.results.logprobs import MOST_TOP, PromptScores
from csd.engine.step.step import Step
from csd.graph.prior import Prior
from csd.serve.handle import Handle
from csd.serve.inbox import Counters, Inbox
from csd.serve.reader import Reader
from csd.serve.repeats import Repeats
from csd.serve.served_requests import ServedRequests
from csd.serve.session import AsyncSession
from csd.serve.weights import Weights
from csd.traces.history import History
from csd.utils.arguments import check_flag, check_whole, options_of
from csd.utils.check import shown
from csd.utils.phases import is_shown

# options that apply to all requests, set when the engine is made
SET_AT_START = ("speculate", "drafter", "prior", "budget", "tokenizer")
# capacity of owners' priors beside no other one: 3 MB each
OWN_CONTEXTS = 1 << 14
# options of a single request: sampling, the samples to draw, the prompt, and the reported values of
# tokens. logits_processor is left out: it runs inside a step, which all requests share
SERVED = SAMPLING - {"logits_processor"} | {
    *("num_samples", "first_sample", "on_error", "seed", "until", "history", "truncate_prompt"),
    *("chat_template_kwargs", "top_logprobs", "entropy", "prompt_logprobs"),
}


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a prompt and its samples, passed in place of the model's config."""

    vocab: int
    context: int


def read_call(
    prompt: Any, options: Mapping[str, Any], engine: Engine, limits: PromptLimits
) -> Call:
    """Read a call of one prompt. Raises TypeError or ValueError naming the argument."""
    for name in options:
        if name in SET_AT_START:
            raise ValueError(f"{name} applies to all requests: set it when the AsyncEngine is made")
        if name in Options.__annotations__ and name not in SERVED:
            raise ValueError(
                f"{name} is an argument of csd.generate that requests of an AsyncEngine do not "
                "support"
            )
    if isinstance(options.get("history"), History):
        raise ValueError("history must be a list of past samples, got a csd.History")
    asked = read_options(options)
    # a prompt that cannot be served is refused here: `on_error` concerns samples in flight
    early = asked | {"on_error": "raise"}
    call = Call.read(prompt, early, limits, engine.generation_config, engine.tokenizer)
    call.settings = replace(call.settings, returns_errors=asked["on_error"] == "return")
    if call.many:
        raise ValueError(f"prompt must be one prompt, got {len(call.requests)}")
    return call


def own_priors(prior: Prior | None, owners: Collection[str]) -> dict[str, Prior]:
    """Priors that learn, by owner, each with the contexts of `prior`, if there is one.

    Raises TypeError for anything else than a collection of names.
    """
    if isinstance(owners, str) or not all(isinstance(owner, str) for owner in owners):
        raise TypeError(f"learn_from must be a list of owners, got {shown(owners)}")
    contexts = OWN_CONTEXTS if prior is None else prior.config.capacity
    priors = {owner: Prior(learn=True, contexts=contexts) for owner in owners}
    if prior is not None:
        for own in priors.values():
            own.merge(prior)
    return priors


LOG = logging.getLogger("csd")

T = TypeVar("T")
_open: "weakref.WeakSet[AsyncEngine]" = weakref.WeakSet()


@shows(ServiceOptions)
class AsyncEngine:
    """An engine with a thread of its own that admits requests while others are drawn.

    A request's samples are those of `csd.generate` with its seed, whatever else is in flight: equal
    in float64, bitwise equal if `engine.exact`, and otherwise equal up to rounding.

    model: as for `csd.Engine`, or an Engine; its `generate` runs while nothing is in flight.
    `longest` is the `max_tokens` in effect. With more than `max_queue` waiting requests, `submit`
    raises `QueueFull`. The prior does not learn: requests of others would show in what a request
    drafts.

    {options}
    """

    def __init__(self, model: Any, **options: Unpack[ServiceOptions]):
        engine_options = sorted(options_of(SharedOptions).keys() & options.keys())
        if isinstance(model, Engine) and engine_options:
            raise ValueError(
                f"{engine_options[0]} must be set when the Engine is made; it cannot be given "
                "with an Engine"
            )
        asked = read_options(options, ServiceOptions)
        of_runs = ("budget", "speculate", "drafter", "prior")
        self._settings = RunSettings(returns_errors=True, **{name: asked[name] for name in of_runs})
        prior = self._settings.prior
        if prior is not None and prior.learn:
            raise ValueError(
                "prior must have learn=False for an AsyncEngine, whose requests may be of several "
                "users, got learn=True: load it with csd.Prior.load(path), which only reads"
            )
        self.priors = own_priors(prior, asked["learn_from"])
        if self.priors and prior is None:
            prior = Prior(contexts=OWN_CONTEXTS)  # empty, for all other owners
        self._settings = replace(self._settings, prior=prior, own_priors=self.priors)
        of_engine: Any = {name: asked[name] for name in engine_options}
        self.engine = model if isinstance(model, Engine) else Engine(model, **of_engine)
        self.counters = Counters()
        self._inbox = Inbox(asked["max_queue"], self.counters)
        self._sizes = ServedSizes(asked["max_tokens"])
        self._weights = Weights()
        self._requests: ServedRequests | None = None  # in flight
        self._index = count()
        self._repeats = Repeats()
        self._process = os.getpid()
        # folder, hub name or file of the model, as it was given; None for an object
        self.source = os.fspath(model) if isinstance(model, str | os.PathLike) else None
        # this run allocates the caches, so that an error of allocation is raised here
        self.engine.serve(replace(self._settings, progress=is_shown()), self)
        # that run has ended
        self._requests = None
        self._thread = threading.Thread(target=self._run, name="csd.AsyncEngine", daemon=True)
        self._thread.start()
        _open.add(self)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(drain=exc[0] is None)

    def __repr__(self) -> str:
        """The engine, and the requests that wait for a slot."""
        return (
            f"<csd.AsyncEngine of {self.engine!r}, up to {self.longest:,} tokens a request, "
            f"{self.waiting} waiting{', closed' * self.closed}>"
        )

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and a sample together."""
        return self._sizes.longest

    @property
    def weights(self) -> int:
        """Number of times the weights were changed; `Reader.weights` is the number of a request."""
        return self._weights.version

    @property
    def fingerprint(self) -> str:
        """Fingerprint of weights, dtype and arithmetic; equal exact ones give equal samples."""
        return self._weights.fingerprint

    @property
    def waiting(self) -> int:
        """Number of requests that have not been admitted."""
        return self._inbox.waiting

    @property
    def closed(self) -> bool:
        """True if the engine accepts no more requests."""
        return self._inbox.closed or not self._thread.is_alive()

    def limits(self) -> PromptLimits:
        """Current limits of the model."""
        engine = self.engine
        # reading a module's config takes longer than drawing a token
        config = engine.config if engine.model.changed else engine.decoder.config
        return PromptLimits(config.vocab, self.longest)

    def submit(
        self,
        prompt: OnePrompt | Any,
        *,
        owner: str | None = None,
        client: str | None = None,
        stream: bool = True,
        score_prompt: int | None = None,
        detached: bool = False,
        prefix_cache: bool = True,
        graph: Any = None,
        answered: int = 0,
        **options: Unpack[Options],
    ) -> Reader:
        """Request samples of one prompt, from any thread or event loop; returns at once.

        owner: requests of one owner with equal prompts share keys, values and graph, and one with
            the beginning of an earlier prompt its pages; None shares with no request.
        client: requests of one client take at most as many places of the queue as are left free,
            so that others find one; None has no such limit.
        stream: True if the handle returns a sample's tokens and text as they are drawn, False if
            it returns finished samples only.
        detached: False cancels the request once its last reader has left before its end, or no
            reference to the returned object remains; True draws it to its end.
        prefix_cache: False reads the prompt whole, and keeps nothing of it after its end.
        graph: requests in flight with the same object draft for each other, whatever their prompts.
        answered: tokens at the prompt's end that belong to its answer, as those of earlier turns.
        score_prompt: if not None, `Reader.scores` gets the log-probability of each token of the
            prompt but the first, and the `score_prompt` likeliest tokens at its position.
        options: as in `csd.Engine.generate`, except those that apply to all requests. `until` is
            called on the engine's thread, which draws nothing meanwhile.

        Raises ValueError or TypeError as `generate` does, `QueueFull`, and `Closed`.
        """
        if os.getpid() != self._process:
            raise RuntimeError("the AsyncEngine must be used in the process that made it")
        detached = check_flag("detached", detached)
        prefix_cache = check_flag("prefix_cache", prefix_cache)
        limits = self.limits()
        scores = None
        if score_prompt is not None:
            most = min(MOST_TOP, limits.vocab)
            scores = PromptScores(check_whole("score_prompt", score_prompt, 0, most))
        call = read_call(prompt, options, self.engine, limits)
        request: Request = call.requests[0]
        request.index, request.scope = next(self._index), owner if prefix_cache else None
        request.graph, request.answered = graph, answered
        request.streams, request.measures = stream, call.settings.measures
        # the index counts all requests of the engine, which a caller cannot use
        request.name = "the prompt"
        self._repeats.note(request.key, request.samples.start)
        request.progress.scores = scores or request.progress.scores
        if has_grammar(request.params):
            # here, since the requests in flight wait for the engine's thread
            request.matcher = matcher_of(request.params, request.tokenizer, limits.vocab)
        priors = self._settings.priors
        if priors:
            request.prior_part = 1 + [*self.priors].index(owner) if owner in self.priors else 0
            request.progress.stats.prior_tokens = priors[request.prior_part].tokens
        until, returns_errors = call.settings.until, call.settings.returns_errors
        handle = Handle(
            request, owner=owner, client=client, until=until, returns_errors=returns_errors
        )
        self._inbox.put(handle)
        return Reader(handle, detached)

    def session(
        self,
        prompt: OnePrompt | Any,
        *,
        num_samples: int = 1,
        seed: int | None = None,
        owner: str | None = None,
    ) -> AsyncSession:
        """Begin `num_samples` texts with a prompt, which `AsyncSession.sample` continues in turns.

        prompt, seed: as in `csd.generate`, whose samples are those of the first turn. owner: as in
        `submit`; None shares with no other session.
        """
        return AsyncSession(self, prompt, num_samples, seed, owner)

    def update(self, change: Callable[[Engine], T]) -> T:
        """Call `change(engine)` once all requests in flight have ended; returns its result.

        Requests that arrive in the meantime wait. Exceptions of `change` are raised here.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("update must be called from another thread than the engine's own")
        return self._inbox.ask(lambda: change(self.engine)).result()

    def update_weights(self, folder: str) -> int:
        """Load the weights of a folder once all requests in flight have ended; returns the version.

        If they cannot be loaded, the current weights are kept.
        """
        return self.update(lambda engine: self._weights.replace(engine, folder))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests, and wait at most `timeout` seconds for the thread to end.

        drain: True draws accepted requests to their end; False cancels them.
        """
        self._inbox.close(abandon=not drain)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # methods of `csd.engine.engine.Feed`, which the engine calls while it holds its lock

    def prepare(self, engine: Engine, drafter: Any, nodes: int) -> Step:
        self._weights.mark(engine)
        return engine.caches.prepare_served(self._sizes, drafter, nodes, self._settings.priors)

    def policy(self) -> ServedRequests:
        self._requests = ServedRequests(
            self._inbox,
            self.counters,
            self._weights,
            lambda: self.engine.model.changed,
            self.engine.together,
        )
        return self._requests

    # the thread

    def _run(self) -> None:
        """Serve until the inbox is closed; whatever ends the thread, no caller waits for it."""
        error = None
        try:
            self._serve()
        except BaseException as raised:
            LOG.exception("the thread of the AsyncEngine has ended; it accepts no more requests")
            error = RuntimeError(f"the engine's thread has ended: {raised!r}")
            error.__cause__ = raised
        finally:
            self._end([*self._inbox.end(error), *self._in_flight()], error)

    def _serve(self) -> None:
        while self._inbox.wait():
            for job, future in self._inbox.jobs():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)
            if self._inbox.abandoned:
                self._end(self._inbox.take(), None)
            elif self._inbox.has_requests:
                self._draw()

    def _draw(self) -> None:
        """Run the engine until nothing is in flight; if it fails, requests end with the error."""
        try:
            self.engine.serve(self._settings, self)
        # every request in flight ends with this error
        except BaseException as error:
            LOG.exception("the engine has failed; requests in flight end with this error")
            # those in the inbox if no run began
            self._end(self._in_flight() if self._requests else self._inbox.take(), error)
        self._requests = None

    def _in_flight(self) -> list[Handle]:
        return [] if self._requests is None else [*self._requests.handles.values()]

    def _end(self, handles: list[Handle], error: BaseException | None) -> None:
        """End requests. error: their error; None counts them as cancelled."""
        self.counters.slots = self.counters.groups = 0
        for handle in handles:
            if not handle.admitted:
                self._inbox.admitted(handle)
            self.counters.ended(handle.request.progress.stats, 0, error is None, error is not None)
            handle.end(error, texts=False)


@atexit.register
def _close_all() -> None:
    for engine in [*_open]:
        engine.close(drain=False, timeout=10)
