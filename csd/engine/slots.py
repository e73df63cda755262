"""Slots of an engine: plans are applied to them, so prompts are read and samples begin and end.

A policy chooses the prompts and samples (`plan.py`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from csd.engine.plan import Begun, Ended, Event, Failed, Plan, Start, StepView
from csd.engine.requests.request import LiveSample, Request, check_served
from csd.engine.requests.slot_edits import Refill, clear_slot, fill_slots, join_classes
from csd.engine.results.logprobs import Measures
from csd.engine.results.savings import common_tokens
from csd.engine.rules.changes import Changes
from csd.engine.rules.tables import asked_of, changes_rows, set_of
from csd.engine.step.prefill import Prefill, read_chunks, reads_several, units_of
from csd.engine.step.step import Clock, Step
from csd.state.kv_cache import in_turn

# once this many rows of past samples are entered between two steps, the rest waits
HISTORY_ROWS = 4096


class HostSlots:
    """Samples in the slots of a step, and the prompts that are read for them.

    group_keys: keys of new groups, never reused. arrive: whether requests arrive during the run, so
    that each is checked, and changes the step's rules, when it begins.
    """

    def __init__(
        self,
        step: Step,
        *,
        tokenizer: Any,
        prefill_chunk: int,
        group_keys: Iterator[int],
        arrive: bool = False,
    ):
        self.step, self.tokenizer, self.arrive = step, tokenizer, arrive
        self.prefill_chunk, self.group_keys = prefill_chunk, group_keys
        self.owners: list[LiveSample | None] = [None] * step.slots.count
        self.active: list[Request] = []  # whose prompts are read
        self.steps = 0
        self._reading: dict[int, Prefill] = {}  # by request, in the order of their begin
        self._refills: dict[int, Refill] = {}  # by slot, of samples that the next step begins
        self._texts = count()  # numbers of prompts
        # tokens of prompts, and rows of past samples, since the last step
        self._read_tokens = self._entered_rows = 0

    def view(self) -> StepView:
        """Returns the plain values from which a policy decides."""
        allocator = self.step.cache.allocator
        return StepView(
            slots=len(self.owners),
            free=tuple(s for s, owner in enumerate(self.owners) if owner is None),
            active=tuple(self.active),
            reading=tuple(prefill.request for prefill in self._reading.values()),
            reads_on=self._reads_on,
            pages=self.step.cache.pages,
            free_pages=len(allocator),
            held_pages=sum(len(owner.pages) for owner in self.owners if owner is not None),
            cached_pages=0 if allocator.index is None else allocator.index.idle_pages,
            groups=len({request.place.group for request in self.active}),
            reach=self.step.cache.reach,
            steps=self.steps,
            seconds=self.step.seconds,
        )

    def apply(self, plan: Plan) -> list[Event]:
        """Carry out a plan; returns its events. An error is that of its request."""
        events: list[Event] = [self._end(request) for request in plan.end]
        acts = [
            (request, partial(self._join, request, mate, events)) for request, mate in plan.join
        ]
        acts += [(start.request, partial(self._start, start)) for start in plan.start]
        if plan.read:
            acts.append((plan.read[0], partial(self._read, plan.read, events)))
        for request, act in acts:
            try:
                act()
            # a panic of a tokenizer or a grammar is a BaseException
            except BaseException as error:
                events.append(Failed(request, error))
        return events

    def fill(self) -> int:
        """Write the samples that were started to their slots, in one copy to the device; returns
        the number of slots that the next step runs."""
        step, refills = self.step, [*self._refills.values()]
        self._refills.clear()
        self._read_tokens = self._entered_rows = 0
        fill_slots(step.slots, step.cache.slot_pages, refills)
        if refills and step.sharing:
            texts = [-1 if owner is None else owner.request.place.text for owner in self.owners]
            join_classes(step.slots, [refill.slot for refill in refills], texts)
        if step.cache.states is not None:
            for refill in refills:
                step.cache.states.begin_sample(refill.slot, refill.request.place.group)
        if step.changes is not None:
            step.changes.fill(refills)
        owners = [owner for owner in self.owners if owner is not None]
        asked = [o.request.measures for o in owners if o.request.measures is not None]
        if asked:
            step.measures = Measures(max(m.top for m in asked), any(m.entropy for m in asked))
        return step.count_live(len(owners))

    def _start(self, start: Start) -> None:
        """Assign a slot and pages to a request's sample."""
        s, request, index = start.slot, start.request, start.index
        request.progress.waiting.remove(index)
        max_new = request.params.max_new_tokens
        pages = self.step.cache.take_for_sample(max_new)
        try:
            live = LiveSample(request, index, pages, self.tokenizer)
            refill = Refill(s, request, index, in_turn(pages, max_new))
            if self.step.changes is not None:
                self.step.changes.begin(refill)
        except BaseException:
            self.step.cache.allocator.give_back(pages)
            raise
        request.progress.live[index] = self.owners[s] = live
        self._refills[s] = refill

    def free(self, s: int, live: LiveSample) -> None:
        """Free slot s and the pages of its sample."""
        live.done = True
        self.owners[s] = None
        self._refills.pop(s, None)
        clear_slot(self.step.slots, s)
        self.step.cache.allocator.give_back(live.pages)
        del live.request.progress.live[live.index]

    def _end(self, request: Request) -> Ended:
        """Cancel a request's unfinished samples, and free what it holds."""
        error = None
        try:
            results = request.result()
        # of a tokenizer
        except BaseException as raised:
            error, results = raised, request.result(texts=False)
        rest = [sample for sample in results if sample.index not in request.progress.finished]
        request.progress.finished |= {sample.index: sample for sample in rest}
        for s, live in enumerate(self.owners):
            if live is not None and live.request is request:
                self.free(s, live)
        request.progress.waiting.clear()
        if self._reading.pop(request.index, None) is not None:
            self._free_group(request)
        elif request in self.active:
            self.active.remove(request)
            if not any(other.place.group == request.place.group for other in self.active):
                self._free_group(request)
        return Ended(request, rest, error)

    def _free_group(self, request: Request) -> None:
        """Free the pages and states of a request's prompt, and its group's graph."""
        self.step.cache.allocator.give_back(request.place.pages)
        self.step.slots.group_key[request.place.group].fill_(-1)
        if self.step.cache.states is not None:
            self.step.cache.states.prompts.pop(request.place.group, None)

    def _join(self, request: Request, mate: Request, events: list[Event]) -> None:
        """Give a request the pages and the graph of another one with the same prompt."""
        self._admit(request)
        request.place = mate.place
        request.progress.stats.cached_tokens = len(request.prompt)
        self.active.append(request)
        events.append(Begun(request, joined=True))

    def _read(self, requests: Sequence[Request], events: list[Event]) -> None:
        """Read the first prompt, and others in its passes; adds an event for each that begins.

        Between two steps at most one chunk of tokens is read, of one prompt or of several short
        ones, so no step waits for more; but if no sample waits, the first is read to its end.
        """
        request, *others = requests
        if request.index not in self._reading:
            self._begin(request, events)
        prefill = self._reading[request.index]
        clock = Clock(self.step.seconds)
        while self._reads_on:
            if prefill.chunk:
                left = min(self.prefill_chunk, self.step.cache.rows)
                if self._waited_for:
                    left = min(left, self.prefill_chunk - self._read_tokens)
                prefills = [prefill, *self._along(others, left - prefill.chunk, events)]
                # count the tokens of all prompts of this pass, before their chunks advance
                self._read_tokens += sum(each.chunk for each in prefills)
                read_chunks(prefills)
            elif rows := prefill.enter_history():
                self._entered_rows += rows
            else:
                prefill.end()
                self.active.append(self._reading.pop(request.index).request)
                break
        clock.lap("prefill")

    @property
    def _reads_on(self) -> bool:
        """True if the next chunk, or the past samples, of the first prompt that is being read need
        not wait for a step."""
        prefill = next(iter(self._reading.values()), None)
        if prefill is None or not self._waited_for:
            return True
        if prefill.chunk:
            return self._read_tokens + prefill.chunk <= self.prefill_chunk
        return self._entered_rows < HISTORY_ROWS

    @property
    def _waited_for(self) -> bool:
        """True if samples in flight wait while prompts are read."""
        return self.steps > 0 and any(self.owners)

    def _along(
        self, requests: Sequence[Request], rows: int, events: list[Event]
    ) -> Iterator[Prefill]:
        """Prompts whose next chunks, in all at most `rows` tokens, share another prompt's pass."""
        if not reads_several(self.step):
            return
        for request in requests:
            if request.index not in self._reading:
                if not self._begins_along(request, rows):
                    return
                self._begin(request, events)
            prefill = self._reading[request.index]
            if 0 < prefill.chunk <= rows:
                rows -= prefill.chunk
                yield prefill

    def _begins_along(self, request: Request, rows: int) -> bool:
        """True if a request's first chunk has at most `rows` tokens, and no prompt that is being
        read will have more of its beginning."""
        units = units_of(self.step, request, self.prefill_chunk)
        index = self.step.cache.allocator.index
        if index is not None and request.place.units and len(units) < len(request.place.units):
            missing = request.place.units[len(units)]
            if any(prefill.will_keep(missing) for prefill in self._reading.values()):
                return False
        left = len(request.prompt) - 1 - len(units) * (index.tokens if index else 0)
        return min(self.prefill_chunk, left) <= rows

    def _begin(self, request: Request, events: list[Event]) -> None:
        """Reserve a group and pages for a prompt."""
        self._admit(request)
        others = [*self.active, *(prefill.request for prefill in self._reading.values())]
        taken = {other.place.group for other in others}
        group = next(g for g in range(len(self.owners)) if g not in taken)
        # the longest beginning that is in the graph already
        known = self._enter_graph(request, others)
        twins = [other.place.text for other in others if shares_text(other, request)]
        request.place.text = twins[0] if twins else next(self._texts)
        try:
            prefill = Prefill.begin(self.step, request, group, self.prefill_chunk, known)
        except BaseException:
            if request.place.pages:
                self._free_group(request)
            raise
        self._reading[request.index] = prefill
        events.append(Begun(request))

    def _enter_graph(self, request: Request, others: Sequence[Request]) -> int:
        """Set the key of the request's graph: that of the others with the same `graph`, if any.

        Returns the number of tokens, but for the first, that they have in common with the prompt.
        """
        drafter, mates = self.step.drafter, []
        if request.graph is not None and drafter is not None and drafter.shares_keys:
            mates = [other for other in others if other.graph is request.graph]
        request.place.graph_key = mates[0].place.graph_key if mates else next(self.group_keys)
        shared = (common_tokens(request.prompt, other.prompt) for other in mates)
        return max(max(shared, default=0) - 1, 0)

    def _admit(self, request: Request) -> None:
        """Cut the history of a request that has arrived to fit, and set the step's rules for it.

        Raises ValueError if the step, as it is now, cannot serve the request.
        """
        if not self.arrive:
            return
        step = self.step
        check_served([request], step.decoder.config)
        if request.history:
            used = None
            if step.drafter is not None:
                used = step.drafter.max_history(request.history, len(self.owners))
            if used is None:
                raise ValueError("history needs drafter='consensus' and speculate=True")
            request.cut_history(used)
        self._admit_rules(request)
        request.progress.stats.name_decoder(step.decoder)

    def _admit_rules(self, request: Request) -> None:
        """Set the step's changes of rows to those of `request` and all active requests."""
        step, before = self.step, self.step.changes
        if before is None and not changes_rows(request.params):
            return
        requests = [*self.active, request]
        asked = asked_of(requests)
        if before is not None and asked == before.asked and set_of(request.params) in before.sets:
            return
        if asked.host and step.static:
            raise ValueError("grammars run on the host: they need an engine with static=False")
        vocab = step.decoder.config.vocab
        made = Changes.of_call(requests, step.slots, vocab, before, step.static, self.tokenizer)
        if made is not None:
            # new matchers read the tokens that their samples have committed
            refills = [
                Refill(s, live.request, live.index, live.pages)
                for s, live in enumerate(self.owners)
                if live is not None
            ]
            for refill in refills:
                made.begin(refill)
            made.fill(refills)
        step.changes = made


def clear(step: Step) -> None:
    """Free all slots, groups and pages, at whatever point a call was interrupted."""
    step.slots.live.fill_(False)
    step.slots.progress_penalty.fill_(0)
    step.slots.group.fill_(-1)
    step.slots.group_key.fill_(-1)
    step.cache.reset()


def shares_text(a: Request, b: Request) -> bool:
    """True if samples of two requests may share rows: their trees then draft for both of them.

    A history drafts for the samples of its own request alone.
    """
    within = a.scope is not None and a.scope == b.scope
    return within and not a.history and not b.history and a.prompt == b.prompt
