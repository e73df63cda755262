"""Requests that are admitted between two steps, in the order of their arrival.

A request is admitted if the current model, pages and step can serve it (`refusal`). Requests of one
owner with equal prompts are one group while any of them has samples: later ones share the existing
pages and graph. Whatever else is in flight, a request's samples are a function of its own prompt,
seed, indices and parameters.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from weakref import proxy

from csd.engine.requests.request import LiveSample, Request, check_served
from csd.engine.requests.slot_edits import Refill
from csd.engine.results.logprobs import Measures
from csd.engine.results.result import UNFINISHED, Sample
from csd.engine.rules.changes import Changes
from csd.engine.rules.tables import asked_of, changes_rows, set_of
from csd.engine.scheduler import Scheduler
from csd.engine.slot_filler import SlotFiller
from csd.engine.step.prefill import Prefill
from csd.serve.handle import Handle
from csd.serve.inbox import Counters, Inbox
from csd.serve.turns import Turns
from csd.serve.twins import Twins, alike
from csd.serve.weights import Weights
from csd.state.kv_cache import pages_for


def pages_of(request: Request, prompt: bool) -> int:
    """Number of pages of one sample; prompt: True adds the pages of its prompt."""
    pages = pages_for(request.params.max_new_tokens)
    return pages + pages_for(len(request.prompt) - 1) if prompt else pages


def refusal(slots: SlotFiller, request: Request, pages: int) -> Exception | None:
    """Admit a request: cut its history to fit and set the step's rules; None, or an error if
    refused.

    pages: number of pages that the caches have.
    """
    step = slots.step
    try:
        check_served([request], step.decoder.config)
    except ValueError as error:
        return error
    if pages_of(request, prompt=True) > pages:
        return ValueError(
            f"the prompt of {len(request.prompt)} tokens with "
            f"max_new_tokens={request.params.max_new_tokens} needs more than the {pages} pages "
            "available since the model was changed"
        )
    if request.history:
        used = None
        if step.drafter is not None:
            used = step.drafter.max_history(request.history, len(slots.owners))
        if used is None:
            return ValueError("history needs drafter='consensus' and speculate=True")
        request.stats.history_left_out += sum(map(len, request.history[used:]))
        request.history = request.history[:used]
        request.stats.history_tokens = sum(map(len, request.history))
    return _admit_rules(slots, request)


def _admit_rules(filler: SlotFiller, request: Request) -> Exception | None:
    """Set the step's changes of rows to those of `request` and all active requests.

    Returns the error if the request is refused.
    """
    step, before = filler.step, filler.step.changes
    if before is None and not changes_rows(request.params):
        return None
    requests = [*filler.active, request]
    asked = asked_of(requests)
    if before is not None and asked == before.asked and set_of(request.params) in before.sets:
        return None
    if asked.host and step.static:
        return ValueError("grammars run on the host: they need an engine with static=False")
    slots, vocab = step.slots, step.decoder.config.vocab
    made = Changes.of_call(requests, slots, vocab, before, step.static, filler.tokenizer)
    if made is not None:
        # new matchers read the tokens that their samples have committed
        refills = [
            Refill(s, live.request, live.index, live.pages)
            for s, live in enumerate(filler.owners)
            if live is not None
        ]
        for refill in refills:
            made.begin(refill)
        made.fill(refills)
    step.changes = made
    return None


class ServiceSource:
    """Requests of an inbox, until nothing is in flight; whatever fails ends one request alone.

    weights: the weights that draw. stale: returns True if the model was changed since this run
    began; then, and while a change waits, no more requests are admitted. together: as in `Engine`,
    by default a quarter: one sample after another, a request would last too long.
    """

    def __init__(
        self,
        inbox: Inbox,
        counters: Counters,
        weights: Weights,
        stale: Callable[[], bool],
        together: int | None,
    ):
        self.inbox, self.counters, self.stale, self.weights = inbox, counters, stale, weights
        self.together = together
        self.handles: dict[int, Handle] = {}  # of requests that have not ended, by request index
        self.touched: dict[int, Handle] = {}  # with new tokens since their readers were woken
        self.receivers: list[Request] = []  # those that got a sample that ended in this step
        self.counted = 0  # steps that `counters` has
        self.held = False
        self.short = self.frees_enough = False  # of pages, for an owner whose turn it is
        self.twins = Twins()

    def begin(self, scheduler: Scheduler) -> None:
        # weak, so that a run's memory is freed at its end and not by the garbage collector
        self.scheduler, self.slots = proxy(scheduler), proxy(scheduler.slots)
        self.step = scheduler.step
        self.turns = Turns(self.step.slots.count)
        self.counters.pages = len(self.step.cache.allocator)

    # between two steps

    def fill(self) -> int:
        self.counters.steps += self.scheduler.steps - self.counted
        self.counted = self.scheduler.steps
        for handle in self.touched.values():
            handle.wake()
        self.touched.clear()
        owned = 0
        while not owned:
            self.take_in()
            self.join_twins()
            self.slots.refill()
            owned = self.slots.owned
            if not owned and not self.slots.queue:
                break
        owners = [owner.request.index for owner in self.slots.owners if owner is not None]
        asked = [self.handles[i].measures for i in owners]
        self.step.measures = Measures(
            max((m.top for m in asked), default=0), any(m.entropy for m in asked)
        )
        self.counters.slots = owned
        self.counters.groups = len({r.group for r in self.slots.active})
        self.counters.free_pages = len(self.step.cache.allocator)
        index = self.slots.prefix_index
        self.counters.cached_pages = 0 if index is None else index.idle_pages
        return owned

    def take_in(self) -> None:
        if self.inbox.has_requests and not self.held:
            self.held = self.inbox.has_jobs or self.stale()
        arrived = [] if self.held else self.inbox.take()
        for handle in arrived:
            request = handle.request
            self.handles[request.index] = handle
            request.until, request.on_tokens = handle.until, self.on_tokens
            request.streams, request.measures = handle.streams, handle.measures
            # the index counts all requests of the engine, which a caller cannot use
            request.name = "the prompt"
            self.slots.queue.append(request)
        ended = self.inbox.withdrawn() + [handle for handle in arrived if handle.left]
        if self.inbox.abandoned:
            ended = [*self.handles.values()]
        for handle in ended:
            if handle.request.index in self.handles:
                self.stop(handle)

    def next_request(self) -> Request | None:
        if self.slots.prefill is not None:
            self.admit_one(self.slots.prefill.request)
        live = Counter(self.owner_of(o.request) for o in self.slots.owners if o is not None)
        waiting: Counter[Hashable] = Counter()
        reading = [self.slots.prefill.request] if self.slots.prefill is not None else []
        for request in (*self.slots.active, *reading, *self.slots.queue):
            if request.waiting:
                waiting[self.owner_of(request)] += len(request.waiting)
        self.short = False
        for owner in self.turns.order(live, waiting):
            candidate = self.next_of(owner)
            if candidate is not None:
                self.turns.served(owner)
                return candidate
            if self.short and self.frees_enough:
                # no sample may take the pages that this owner waits for
                return None
        return None

    def together_of(self, request: Request) -> int:
        """Most samples of a request in flight while other prompts wait."""
        return self.together or -(-len(request.samples) // 4)

    def next_of(self, owner: Hashable) -> Request | None:
        """Request of an owner whose next sample gets a free slot."""
        while True:
            own = [r for r in self.slots.active if r.waiting and self.owner_of(r) == owner]
            for request in own:
                if len(request.live) < self.together_of(request) and self.has_pages(request, False):
                    return request
            queued = next((r for r in self.slots.queue if self.owner_of(r) == owner), None)
            if queued is None or self.slots.prefill is not None or self.short:
                break
            self.admit_one(queued)
            if queued in self.slots.queue:
                break
        if self.slots.prefill is not None and self.owner_of(self.slots.prefill.request) == owner:
            return None
        return next((r for r in own if r.waiting and self.has_pages(r, False)), None)

    def admit_one(self, request: Request) -> None:
        """Begin with a waiting request, let it join a group, or read on in its prompt.

        Whatever fails meanwhile is due to this request and ends it alone.
        """
        handle = self.handles[request.index]
        try:
            begins = request in self.slots.queue
            if begins and not self.begins(handle):
                return
            self.slots.admit()
            if begins:
                cached = request.stats.cached_tokens
                self.counters.prompt_tokens += len(request.prompt) - cached
                self.counters.cached_prompt_tokens += cached
        # a panic of a tokenizer or a grammar is a BaseException
        except BaseException as error:
            if request.index in self.handles:
                self.stop(handle, error)

    def begins(self, handle: Handle) -> bool:
        """True if the prompt of a waiting request is to be read now: there is room, and it neither
        is refused nor joins a group."""
        request = handle.request
        error = refusal(self.slots, request, self.counters.pages)
        if error is not None:
            self.stop(handle, error)
            return False
        if self.joins(handle) or self.slots.prefill is not None:
            return False
        groups = {r.group for r in self.slots.active}
        if len(groups) == len(self.slots.owners) or not self.has_pages(request, True):
            return False
        self.enter(handle)
        # `admit` reads the first prompt of the queue
        self.slots.queue.remove(request)
        self.slots.queue.appendleft(request)
        return True

    def join_twins(self) -> None:
        """Let requests join those in flight that draw the same samples, which needs no slot."""
        handles = [self.handles[request.index] for request in self.slots.active]
        groups = {handle.group for handle in handles} - {None}
        for request in [*self.slots.queue] if groups else []:
            handle = self.handles[request.index]
            if handle.group in groups and any(alike(handle, other) for other in handles):
                self.admit_one(request)

    def joins(self, handle: Handle) -> bool:
        """Let a request join its group, if that is in flight; returns whether it is."""
        leader, request = self.leader(handle), handle.request
        if leader is None:
            return False
        self.enter(handle)
        self.slots.queue.remove(request)
        request.group, request.pages = leader.group, leader.pages
        request.text = leader.text
        self.counters.shared_prompt_tokens += len(request.prompt)
        request.stats.cached_tokens = len(request.prompt)
        self.slots.active.append(request)
        self.join(handle)
        return True

    def read_along(self, rows: int) -> Iterable[Prefill]:
        # `admit_one` decides at a request's turn if it is refused, joins a group or has room
        return ()

    def join(self, handle: Handle) -> None:
        """Let a request wait for, or receive, samples that another request of its owner draws."""
        request = handle.request
        # one that waits in the queue may itself wait for another's samples once it is admitted
        others = [self.handles[other.index] for other in self.slots.active]
        for sample in self.twins.join(handle, others):
            handle.give(sample)
        self.counters.shared_samples += len(request.awaited) + len(request.finished)
        self.touched[request.index] = handle
        self.settle(handle)

    def settle(self, handle: Handle) -> None:
        """Call `until` for a request that received samples of another one, and end it if done."""
        try:
            for _ in self.scheduler.check_until(handle.request):
                pass
        # an exception of `until`
        except BaseException as error:
            self.stop(handle, error)
        if handle.request.done and handle.request.index in self.handles:
            self.slots.retire(handle.request)
            self.finish(handle)

    def leader(self, handle: Handle) -> Request | None:
        """A request in flight of the same group; None if there is none."""
        if handle.group is None:
            return None
        return next(
            (r for r in self.slots.active if self.handles[r.index].group == handle.group), None
        )

    def has_pages(self, request: Request, prompt: bool) -> bool:
        """True if enough pages are free for one sample; prompt: True includes its prompt.

        If not, `short` is set, and `frees_enough` to whether samples in flight hold enough.
        """
        pages, free = pages_of(request, prompt), len(self.step.cache.allocator)
        if pages > free and not self.short:
            held = sum(len(live.pages) for live in self.slots.owners if live is not None)
            self.short, self.frees_enough = True, pages <= free + held
        return pages <= free

    def owner_of(self, request: Request) -> Hashable:
        """A request's owner; one without is its own."""
        owner = self.handles[request.index].owner
        return request.index if owner is None else owner

    def enter(self, handle: Handle) -> None:
        handle.weights, handle.fingerprint = self.weights.version, self.weights.fingerprint
        handle.began = dict(self.step.seconds)
        handle.request.stats.name_decoder(self.step.decoder)
        handle.admitted = True
        self.inbox.admitted(handle)

    def ending(self) -> bool:
        # the progress penalty makes samples end together, but requests need not end together
        return not self.slots.any_waits and len(self.slots.active) == 1

    # results of a step

    def advanced(self, request: Request, new: int) -> None:
        self.counters.sample_steps += 1
        self.counters.tokens += new
        if request.done and request.index in self.handles:
            self.finish(self.handles[request.index])
        receivers, self.receivers = self.receivers, []
        for other in receivers:
            if other.index in self.handles:
                self.settle(self.handles[other.index])

    def failed(
        self, request: Request, error: BaseException, index: int | None = None
    ) -> Iterable[tuple[Request, Sample]]:
        if error is request.fault and index is not None:
            # an error of this request's rules is one of theirs too
            for other in [*self.twins.of(request, index)]:
                self.stop(self.handles[other.index], copy(error))
        self.stop(self.handles[request.index], error)
        return ()

    def leave(self, request: Request) -> None:
        self.twins.leave(request)

    def on_tokens(self, request: Request, live: LiveSample, tokens: list[int], text: str) -> None:
        handles = [self.handles[request.index]]
        if handles[0].group is not None:
            ended = live.index in request.finished
            others = (self.twins.end if ended else self.twins.of)(request, live.index)
            handles += [self.handles[other.index] for other in others]
            if ended:
                self.receivers += others
            else:
                self.twins.keep_text(live, text)
        for handle in handles:
            if math.isnan(handle.first_token):
                handle.first_token = time.perf_counter()
                self.counters.first_token.add(handle.first_token - handle.submitted)
            handle.push(live, tokens, text)
            self.touched[handle.request.index] = handle

    # ends

    def stop(self, handle: Handle, error: BaseException | None = None) -> None:
        """End a request, with an error or cancelled, if it waits, is being read or is in flight."""
        request = handle.request
        if request in self.slots.queue:
            self.slots.queue.remove(request)
        if not handle.admitted:
            self.inbox.admitted(handle)
        if self.slots.prefill is not None and self.slots.prefill.request is request:
            self.slots.prefill = None
            self.slots.free_group(request)
        try:
            for _ in self.scheduler.cancel(request):
                pass
        # an exception of a tokenizer
        except BaseException as raised:
            error = error or raised
            for _ in self.scheduler.cancel(request, texts=False):
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
        longest = max((len(sample.tokens) for sample in request.finished.values()), default=0)
        if longest > 1 and not math.isnan(handle.first_token):
            seconds = time.perf_counter() - handle.first_token
            self.counters.per_token.add(seconds / (longest - 1))
        handle.end(error)
