"""Requests that arrive while an engine runs: from the inbox to their handles' ends.

`ServicePolicy` decides which of them is next. This module takes requests in before its plan, and
passes on the events of a plan and a step: tokens for readers, totals, ends.
"""

import math
import time
from collections.abc import Callable, Mapping
from copy import copy

from csd.engine.plan import Advanced, Begun, Ended, Event, Failed, Plan, StepView
from csd.engine.requests.request import LiveSample
from csd.engine.results.result import UNFINISHED
from csd.serve.handle import Handle
from csd.serve.inbox import Counters, Inbox
from csd.serve.policy import ServicePolicy
from csd.serve.weights import Weights


class ServedRequests:
    """Requests of an inbox, until nothing is in flight: the policy of a run.

    weights: the weights that draw. stale: returns True if the model was changed since this run
    began; then, and while a change waits, no more requests are taken in. together: as in
    `ServicePolicy`.
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
        self.policy = ServicePolicy(together)
        self.touched: dict[int, Handle] = {}  # with new tokens since their readers were woken
        self.counted = 0  # steps that `counters` has
        self.seconds: Mapping[str, float] = {}  # of the run, by phase
        self.held = False

    @property
    def handles(self) -> dict[int, Handle]:
        """Handles of requests that have not ended, by request index."""
        return self.policy.handles

    def plan(self, view: StepView) -> Plan | None:
        for handle in self.touched.values():
            handle.wake()
        self.touched.clear()
        counters, self.seconds = self.counters, view.seconds
        counters.steps += view.steps - self.counted
        self.counted = view.steps
        self.take_in()
        plan = self.policy.plan(view)
        counters.slots = view.owned + (0 if plan is None else len(plan.start))
        counters.groups, counters.pages = view.groups, view.pages
        counters.free_pages, counters.cached_pages = view.free_pages, view.cached_pages
        return plan

    def take_in(self) -> None:
        if self.inbox.has_requests and not self.held:
            self.held = self.inbox.has_jobs or self.stale()
        arrived = [] if self.held else self.inbox.take()
        for handle in arrived:
            self.policy.arrive(handle)
        ended = self.inbox.withdrawn() + [handle for handle in arrived if handle.left]
        if self.inbox.abandoned:
            ended = [*self.handles.values()]
        for handle in ended:
            if handle.request.index in self.handles:
                self.policy.stop(handle)

    def note(self, event: Event) -> None:
        handle = self.handles[event.request.index]
        match event:
            case Begun(joined=joined):
                self.enter(handle, joined)
            case Advanced(live=live, tokens=tokens, text=text):
                self.counters.sample_steps += 1
                self.counters.tokens += len(tokens)
                self.push(handle, live, tokens, text)
            case Failed(request, error, index):
                if error is request.progress.fault and index is not None:
                    # an error of this request's rules is one of theirs too
                    for other in self.policy.twins.of(request, index):
                        self.policy.stop(self.handles[other.index], copy(error))
                self.policy.stop(handle, error)
            case Ended(error=error):
                self.finish(handle, self.policy.ended(handle) or error)

    def enter(self, handle: Handle, joined: bool) -> None:
        """Begin with a request; one that has joined others waits for samples that these draw."""
        request, counters = handle.request, self.counters
        handle.weights, handle.fingerprint = self.weights.version, self.weights.fingerprint
        handle.began = dict(self.seconds)
        handle.admitted = True
        self.inbox.admitted(handle)
        self.policy.place(handle)
        if not joined:
            cached = request.progress.stats.cached_tokens
            counters.prompt_tokens += len(request.prompt) - cached
            counters.cached_prompt_tokens += cached
            return
        counters.shared_prompt_tokens += len(request.prompt)
        # one that waits may itself wait for another's samples once it has joined
        waiting = self.policy.queue
        others = [other for other in self.handles.values() if other not in waiting]
        for sample in self.policy.twins.join(handle, others):
            handle.give(sample)
        counters.shared_samples += len(request.progress.awaited) + len(request.progress.finished)
        self.touched[request.index] = handle
        self.policy.change(handle)

    def push(self, handle: Handle, live: LiveSample, tokens: list[int], text: str) -> None:
        """Give a step's tokens of a sample to its request, and to those that wait for it."""
        handles, twins, request = [handle], self.policy.twins, handle.request
        ended = live.index in request.progress.finished
        if handle.group is not None:
            others = (twins.end if ended else twins.of)(request, live.index)
            handles += [self.handles[other.index] for other in others]
            if not ended:
                twins.keep_text(live, text)
        for each in handles:
            if math.isnan(each.first_token):
                each.first_token = time.perf_counter()
                self.counters.first_token.add(each.first_token - each.submitted)
            each.push(live, tokens, text)
            self.touched[each.request.index] = each
            if ended:
                self.policy.change(each)

    def finish(self, handle: Handle, error: BaseException | None) -> None:
        """End a request's handle; error: its error, None if it has ended or was cancelled."""
        progress = handle.request.progress
        self.touched.pop(handle.request.index, None)
        if not handle.admitted:
            self.inbox.admitted(handle)
        error = error or handle.error
        stats, samples = progress.stats, progress.finished.values()
        stats.seconds = {k: v - handle.began.get(k, v) for k, v in self.seconds.items()}
        if error is None and progress.errors and not handle.returns_errors:
            error = progress.errors[min(progress.errors)]
        reasons = [sample.finish_reason for sample in samples]
        ended = sum(reason not in UNFINISHED for reason in reasons)
        # a request whose `until` cancelled its samples counts as served
        cancelled = handle.until is None and "cancelled" in reasons and error is None
        failed = error is not None or len(progress.errors) == len(reasons) > 0
        self.counters.ended(stats, ended, cancelled, failed)
        longest = max((len(sample.tokens) for sample in samples), default=0)
        if longest > 1 and not math.isnan(handle.first_token):
            seconds = time.perf_counter() - handle.first_token
            self.counters.per_token.add(seconds / (longest - 1))
        handle.end(error)
