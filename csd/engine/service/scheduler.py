"""Scheduler that admits requests between two steps, in the order of their arrival.

Requests of one owner with equal prompts are one group while any of them has samples: later ones
share the existing pages and graph. Whatever else is in flight, a request's samples are a function
of its own prompt, seed, indices and parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from csd.engine.call import RunSettings
from csd.engine.requests import LiveSample, Request, Until
from csd.engine.result import UNFINISHED, Sample
from csd.engine.scheduler import Scheduler
from csd.engine.service.admission import pages_of, refusal
from csd.engine.service.counters import Counters
from csd.engine.service.handle import Handle
from csd.engine.service.inbox import Inbox
from csd.engine.service.twins import Twins
from csd.engine.service.weights import Weights
from csd.engine.step import Step
from csd.engine.step_record import Record
from csd.engine.top_logprobs import Measures

Finished = Iterator[tuple[Request, Sample]]


class ServiceScheduler(Scheduler):
    """Runs until nothing is in flight.

    weights: the weights that draw. stale: returns True if the model was changed since this run
    began; then, and while a change waits, no more requests are admitted.
    """

    def __init__(
        self,
        inbox: Inbox,
        counters: Counters,
        weights: Weights,
        stale: Callable[[], bool],
        step: Step,
        settings: RunSettings,
        **options: Any,
    ):
        settings = replace(settings, on_tokens=self.on_tokens, returns_errors=True)
        super().__init__(step, [], settings, **options)
        self.inbox, self.counters, self.stale, self.weights = inbox, counters, stale, weights
        self.handles: dict[int, Handle] = {}  # of requests that have not ended, by request index
        self.touched: dict[int, Handle] = {}  # with new tokens since their readers were woken
        self.held = False
        self.twins = Twins()
        self.counters.pages = len(step.cache.allocator)

    # between two steps

    def fill(self) -> int:
        owned = 0
        while not owned:
            self.take_in()
            self.refill()
            live = [owner.request.index for owner in self.owners if owner is not None]
            owned = len(live)
            if not owned and not self.queue:
                break
        asked = [self.handles[i].measures for i in live]
        self.step.measures = Measures(
            max((m.top for m in asked), default=0), any(m.entropy for m in asked)
        )
        self.counters.slots, self.counters.groups = owned, len({r.group for r in self.active})
        self.counters.free_pages = len(self.step.cache.allocator)
        return owned

    def take_in(self) -> None:
        if self.inbox.has_requests and not self.held:
            self.held = self.inbox.has_jobs or self.stale()
        arrived = [] if self.held else self.inbox.take()
        for handle in arrived:
            self.handles[handle.request.index] = handle
            self.queue.append(handle.request)
        ended = self.inbox.withdrawn() + [handle for handle in arrived if handle.left]
        if self.inbox.abandoned:
            ended = [*self.handles.values()]
        for handle in ended:
            if handle.request.index in self.handles:
                self.stop(handle)

    def next_request(self) -> Request | None:
        found = super().next_request()
        if found is None and self.prefill is None:
            # no room for the first waiting request: continue with samples of active ones
            found = next((r for r in self.active if r.waiting), None)
        return found if found is not None and self.has_room(found, prompt=False) else None

    def admit(self) -> Request | None:
        while self.prefill is None and self.queue:
            request = self.queue[0]
            handle = self.handles[request.index]
            error = refusal(self, request, self.counters.pages)
            if error is not None:
                self.stop(handle, error)
                continue
            leader = self.leader(handle)
            if leader is not None:
                self.enter(handle)
                self.queue.popleft()
                request.group, request.pages = leader.group, leader.pages
                self.counters.shared_prompt_tokens += len(request.prompt)
                self.active.append(request)
                self.join(handle)
                if not request.waiting:
                    continue
                return request
            if not self.has_room(request, prompt=True):
                return None
            self.enter(handle)
            self.counters.prompt_tokens += len(request.prompt)
            break
        return super().admit()

    def begins_ahead(self, request: Request, rows: int) -> bool:
        # `admit` decides at the request's turn if it is refused, joins a group or has room
        return False

    def join(self, handle: Handle) -> None:
        """Let a request wait for, or receive, samples that another request of its owner draws."""
        request = handle.request
        for sample in self.twins.join(handle, [*self.handles.values()]):
            handle.give(sample)
        self.counters.shared_samples += len(request.awaited) + len(request.finished)
        self.touched[request.index] = handle
        self.settle(handle)

    def settle(self, handle: Handle) -> None:
        """Call `until` for a request that received samples of another one, and end it if done."""
        try:
            for _ in self.check_until(handle.request):
                pass
        # an exception of `until`
        except BaseException as error:
            self.stop(handle, error)
        if handle.request.done and handle.request.index in self.handles:
            self.retire(handle.request)
            self.finish(handle)

    def leader(self, handle: Handle) -> Request | None:
        """A request in flight of the same group; None if there is none."""
        if handle.group is None:
            return None
        return next((r for r in self.active if self.handles[r.index].group == handle.group), None)

    def has_room(self, request: Request, prompt: bool) -> bool:
        """True if enough pages are free for one sample; prompt: True includes its prompt."""
        return pages_of(request, prompt) <= len(self.step.cache.allocator)

    def enter(self, handle: Handle) -> None:
        handle.weights, handle.fingerprint = self.weights.version, self.weights.fingerprint
        handle.began = dict(self.step.seconds)
        stats, decoder = handle.request.stats, self.step.decoder
        stats.decoder = getattr(decoder, "name", "own")
        stats.fused_ruled_out = getattr(decoder, "why", None)
        self.inbox.admitted()

    def ending(self) -> bool:
        # the progress penalty makes samples end together, but requests need not end together
        return super().ending() and len(self.active) == 1

    def queued(self) -> list[Request]:
        """Requests that have not been admitted."""
        return list(self.queue)

    # results of a step

    def streams(self, request: Request) -> bool:
        return self.handles[request.index].streams

    def until(self, request: Request) -> Until | None:
        return self.handles[request.index].until

    def postprocess(self, record: Record) -> Finished:
        self.counters.steps += 1
        yield from super().postprocess(record)
        for handle in self.touched.values():
            handle.wake()
        self.touched.clear()

    def advance(self, live: LiveSample, record: Record, s: int, seen: set[int]) -> Finished:
        handle, request, i = self.handles[live.request.index], live.request, live.index
        others = [*self.twins.of(request, i)]
        self.counters.sample_steps += 1
        try:
            yield from super().advance(live, record, s, seen)
        except GeneratorExit:
            raise
        # errors of `until` and tokenizers end one request; a tokenizer's panic is a BaseException
        except BaseException as error:
            self.stop(handle, error)
        if request.done and request.index in self.handles:
            self.finish(handle)
        for other in others:
            if other.index in self.handles and i not in other.awaited and i in other.finished:
                self.settle(self.handles[other.index])

    def append(self, live: LiveSample, record: Record, s: int, n: int) -> None:
        had = len(live.tokens)
        super().append(live, record, s, n)
        new = len(live.tokens) - had
        self.counters.tokens += new
        # the step measures the most that any request needs: keep this request's share
        measures = self.handles[live.request.index].measures
        live.likely = [row[: measures.top] for row in live.likely] if measures.top else []
        live.entropies = live.entropies if measures.entropy else []

    def name_of(self, request: Request) -> str:
        # the index counts all requests of the engine, which a caller cannot use
        return "the prompt"

    def on_tokens(self, request: Request, live: LiveSample, tokens: list[int], text: str) -> None:
        handles = [self.handles[request.index]]
        if handles[0].group is not None:
            ended = live.index in request.finished
            others = (self.twins.end if ended else self.twins.of)(request, live.index)
            handles += [self.handles[other.index] for other in others]
            if not ended:
                self.twins.keep_text(live, text)
        for handle in handles:
            handle.push(live, tokens, text)
            self.touched[handle.request.index] = handle

    # ends

    def cancel(self, request: Request, texts: bool = True) -> Finished:
        self.twins.leave(request)
        yield from super().cancel(request, texts)

    def stop(self, handle: Handle, error: BaseException | None = None) -> None:
        """End a request, with an error or cancelled, if it waits, is being read or is in flight."""
        request = handle.request
        if request in self.queue:
            self.queue.remove(request)
            self.inbox.admitted()
        if self.prefill is not None and self.prefill.request is request:
            self.prefill = None
            self.free_group(request)
        try:
            for _ in self.cancel(request):
                pass
        # an exception of a tokenizer
        except BaseException as raised:
            error = error or raised
            for _ in self.cancel(request, texts=False):
                pass
        self.finish(handle, error)

    def finish(self, handle: Handle, error: BaseException | None = None) -> None:
        request = handle.request
        del self.handles[request.index]
        self.touched.pop(request.index, None)
        error = error or handle.error
        stats = request.stats
        stats.seconds = {k: v - handle.began.get(k, v) for k, v in self.step.seconds.items()}
        if error is None and request.errors and not handle.returns_errors:
            error = request.errors[min(request.errors)]
        reasons = [sample.finish_reason for sample in request.finished.values()]
        ended = sum(reason not in UNFINISHED for reason in reasons)
        # a request whose `until` cancelled its samples counts as served
        cancelled = handle.until is None and "cancelled" in reasons and error is None
        failed = error is not None or len(request.errors) == len(reasons) > 0
        self.counters.ended(stats, ended, cancelled, failed)
        handle.end(error)
