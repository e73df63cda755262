"""Slots of an engine: prompts are read, free slots get samples, and ended samples free theirs.

Which request is next is the choice of a `RequestSource`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

from csd.engine.requests.request import LiveSample, Request
from csd.engine.requests.slot_edits import Refill, clear_slot, fill_slots, join_classes
from csd.engine.results.result import Sample
from csd.engine.step.prefill import Prefill, read_chunks
from csd.engine.step.step import Clock, Step
from csd.state.kv_cache import in_turn
from csd.state.prefix_cache import PrefixIndex

# once this many rows of past samples are entered between two steps, the rest waits
HISTORY_ROWS = 4096


class RequestSource(Protocol):
    """Requests of a run: the order in which they get slots, and what follows their steps and ends.

    `CallSource` has those of a call, the server's `ServiceSource` those that arrive meanwhile.
    """

    def begin(self, scheduler: Any) -> None:
        """Called once, before the first step, with the scheduler of the run."""

    def fill(self) -> int:
        """Fill free slots; returns the number of slots that hold samples. 0 ends the run."""

    def next_request(self) -> Request | None:
        """Request whose next sample gets a free slot; None while its prompt is read, or if no
        sample waits."""

    def read_along(self, rows: int) -> Iterable[Prefill]:
        """Prompts whose next chunks, in all at most `rows` tokens, share the pass of the prompt
        that is read."""

    def ending(self) -> bool:
        """True if no sample waits, and the samples in flight are one job, which ends with the last
        of them."""

    def advanced(self, request: Request, new: int) -> None:
        """Called for each step of a request's sample, after its `new` tokens have been appended
        and, at its end, its slot has been freed."""

    def failed(
        self, request: Request, error: BaseException, index: int | None = None
    ) -> Iterable[tuple[Request, Sample]]:
        """End a request whose sample `index`, or next sample, cannot go on; returns its samples.

        Raises the error if it ends the run.
        """

    def leave(self, request: Request) -> None:
        """Called before a request's unfinished samples are cancelled."""


class SlotFiller:
    """Assigns samples to free slots, and reads their prompts.

    source: chooses the requests. group_keys: keys of new groups, never reused.
    """

    def __init__(
        self,
        step: Step,
        source: RequestSource,
        *,
        tokenizer: Any,
        prefill_chunk: int,
        group_keys: Iterator[int],
    ):
        self.step, self.source, self.tokenizer = step, source, tokenizer
        self.prefill_chunk, self.group_keys = prefill_chunk, group_keys
        self.queue: deque[Request] = deque()  # whose prompts are not read yet
        self.active: list[Request] = []
        self.texts = count()  # numbers of prompts
        self.owners: list[LiveSample | None] = [None] * step.slots.count
        self.begun = False  # True once a step has run
        self.prefill: Prefill | None = None  # the prompt that is being read
        self.ahead: deque[Prefill] = deque()  # prompts after it that share its passes
        self.read_tokens = 0  # tokens of prompts read since the last step
        self.entered_rows = 0  # rows of past samples entered since the last step

    @property
    def owned(self) -> int:
        """Number of slots that hold samples."""
        return sum(owner is not None for owner in self.owners)

    @property
    def any_waits(self) -> bool:
        """True if a sample waits for a slot."""
        reading = self.prefill or self.ahead
        return bool(self.queue or reading or any(request.waiting for request in self.active))

    def refill(self) -> None:
        """Fill all free slots, in one copy to the device."""
        self.read_tokens = self.entered_rows = 0
        assigned: dict[int, Refill] = {}
        for s in range(len(self.owners)):
            while self.owners[s] is None and (request := self.source.next_request()) is not None:
                try:
                    assigned[s] = self.assign(request, s)
                # a panic of a tokenizer or a grammar is a BaseException
                except BaseException as error:
                    self.source.failed(request, error)
            if self.owners[s] is None:
                break
        # a request may have ended since its first samples were assigned
        refills = [refill for s, refill in assigned.items() if self.owners[s] is not None]
        fill_slots(self.step.slots, self.step.cache.slot_pages, refills)
        if refills and self.step.sharing:
            texts = [-1 if owner is None else owner.request.text for owner in self.owners]
            join_classes(self.step.slots, [refill.slot for refill in refills], texts)
        if self.step.cache.states is not None:
            for refill in refills:
                self.step.cache.states.begin_sample(refill.slot, refill.request.group)
        if self.step.changes is not None:
            self.step.changes.fill(refills)

    def assign(self, request: Request, s: int) -> Refill:
        """Assign slot s and pages to the request's next sample."""
        index = request.waiting.popleft()
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
        request.live[index] = self.owners[s] = live
        return refill

    def admit(self) -> Request | None:
        """Read the next prompt; returns its request at the end, None before it or if none is left.

        Between two steps at most one chunk of tokens is read, of one prompt or of several short
        ones, so no step waits for more. Before the first step no sample waits, so prompts are read
        until the slots are full.
        """
        if self.prefill is None:
            if not self.ahead and not self.queue:
                return None
            self.prefill = self.ahead.popleft() if self.ahead else self.begin_prefill()
        clock = Clock(self.step.seconds)
        if self.read_prompt() and self.enter_history():
            self.prefill.end()
            self.active.append(self.prefill.request)
            self.prefill = None
        clock.lap("prefill")
        return None if self.prefill else self.active[-1]

    def begin_prefill(self) -> Prefill:
        """Take the next prompt from the queue and reserve a group for it."""
        reading = [self.prefill.request] if self.prefill else []
        others = [*self.active, *reading, *(p.request for p in self.ahead)]
        taken = {r.group for r in others}
        group = next(g for g in range(len(self.owners)) if g not in taken)
        request = self.queue.popleft()
        # the longest beginning that is in the graph already
        known = self.enters_graph(request, others)
        twins = [r.text for r in others if shares_text(r, request)]
        request.text = twins[0] if twins else next(self.texts)
        try:
            prefill = Prefill.begin(
                self.step, request, group, request.graph_key, self.prefill_chunk
            )
            prefill.observed = known
            return prefill
        except BaseException:
            if request.pages:
                self.free_group(request)
            raise

    def enters_graph(self, request: Request, others: Sequence[Request]) -> int:
        """Set the key of the request's graph: that of the others with the same `graph`, if any.

        Returns the number of tokens, but for the first, that they have in common with the prompt.
        """
        drafter, mates = self.step.drafter, []
        if request.graph is not None and drafter is not None and drafter.shares_keys:
            mates = [other for other in others if other.graph is request.graph]
        request.graph_key = mates[0].graph_key if mates else next(self.group_keys)
        common = (common_tokens(request.prompt, other.prompt) for other in mates)
        return max(max(common, default=0) - 1, 0)

    def read_prompt(self) -> bool:
        """Read as many chunks of the prompt as a step may wait for; True at the prompt's end."""
        assert self.prefill is not None
        while chunk := self.prefill.chunk:
            left = self.prefill_chunk - self.read_tokens
            if chunk > left and self.waited_for:
                return False
            rows = min(self.prefill_chunk, self.step.cache.rows)
            if self.waited_for:
                rows = min(rows, left)
            prefills = [self.prefill, *self.source.read_along(rows - chunk)]
            # count the tokens of all prompts of this pass, before their chunks advance
            self.read_tokens += sum(prefill.chunk for prefill in prefills)
            read_chunks(prefills)
        return True

    @property
    def waited_for(self) -> bool:
        """True if samples in flight wait while prompts are read."""
        return self.begun and any(self.owners)

    @property
    def prefix_index(self) -> PrefixIndex | None:
        return self.step.cache.allocator.index

    def enter_history(self) -> bool:
        """Enter the prompt's past samples, about HISTORY_ROWS rows per step; True at their end."""
        assert self.prefill is not None
        while self.entered_rows < HISTORY_ROWS or not self.waited_for:
            rows = self.prefill.enter_history()
            if not rows:
                return True
            self.entered_rows += rows
        return False

    def free(self, s: int, live: LiveSample) -> None:
        """Free slot s and the pages of its sample, and retire its request if that is done."""
        live.done = True
        self.owners[s] = None
        clear_slot(self.step.slots, s)
        self.step.cache.allocator.give_back(live.pages)
        del live.request.live[live.index]
        if live.request.done:
            self.retire(live.request)

    def retire(self, request: Request) -> None:
        """Remove a request from the active ones; free its group if no other request uses it."""
        if request in self.active:
            self.active.remove(request)
            if not any(other.group == request.group for other in self.active):
                self.free_group(request)

    def free_group(self, request: Request) -> None:
        """Free the pages and states of a request's prompt, and its group's graph."""
        self.step.cache.allocator.give_back(request.pages)
        self.step.slots.group_key[request.group].fill_(-1)
        if self.step.cache.states is not None:
            self.step.cache.states.free_prompt(request.group)


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


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
