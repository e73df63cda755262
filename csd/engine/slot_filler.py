"""Slots of a call: reads prompts, assigns free slots to samples, and frees slots at their end."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from csd.engine.budget import Budget
from csd.engine.call import RunSettings
from csd.engine.history_args import longest_first
from csd.engine.phase_clock import Clock
from csd.engine.prefill import Prefill, read_chunks, reads_several
from csd.engine.requests import LiveSample, Request
from csd.engine.slot_edits import Refill, clear_slot, fill_slots
from csd.engine.step import Step
from csd.state.kv_cache import in_turn
from csd.state.pool import PROGRESS_PENALTY

# once this many rows of past samples are entered between two steps, the rest waits
HISTORY_ROWS = 4096


class SlotFiller:
    """Assigns samples to free slots, and reads their prompts.

    lag: launched steps whose records may be unread. group_keys: keys of new groups, never reused.
    """

    def __init__(
        self,
        step: Step,
        requests: list[Request],
        settings: RunSettings,
        *,
        budget: Budget,
        tokenizer: Any,
        prefill_chunk: int,
        together: int | None,
        lag: int,
        group_keys: Iterator[int],
    ):
        self.step, self.settings, self.budget = step, settings, budget
        self.tokenizer, self.prefill_chunk = tokenizer, prefill_chunk
        self.together, self.lag, self.group_keys = together, lag, group_keys
        self.queue = deque(longest_first(requests))
        self.active: list[Request] = []
        self.failed: list[Request] = []  # with samples that could not continue
        self.owners: list[LiveSample | None] = [None] * step.slots.count
        self.steps = 0
        self.prefill: Prefill | None = None  # the prompt that is being read
        self.ahead: deque[Prefill] = deque()  # prompts after it that share its passes
        self.read_tokens = 0  # tokens of prompts read since the last step
        self.entered_rows = 0  # rows of past samples entered since the last step
        self.penalises_progress = False  # True while a progress penalty applies

    def fill(self) -> int:
        """Fill free slots; returns the number of slots that hold samples. 0 ends the run."""
        self.refill()
        return sum(owner is not None for owner in self.owners)

    def set_progress_penalty(self) -> None:
        """Set the progress penalty, which favours shorter samples once none waits for a slot."""
        last = self.ending()
        if last != self.penalises_progress:
            self.penalises_progress = last
            self.step.slots.progress_penalty.fill_(PROGRESS_PENALTY if last else 0)

    def ending(self) -> bool:
        """True if no sample waits for a slot."""
        reading = self.prefill or self.ahead
        return not (self.queue or reading or any(r.waiting for r in self.active))

    def refill(self) -> None:
        """Fill all free slots, in one copy to the device."""
        self.read_tokens = self.entered_rows = 0
        assigned: dict[int, Refill] = {}
        for s in range(len(self.owners)):
            while self.owners[s] is None and (request := self.next_request()) is not None:
                refill = self.assign(request, s)
                if refill is not None:
                    assigned[s] = refill
            if self.owners[s] is None:
                break
        # a request may have ended since its first samples were assigned
        refills = [refill for s, refill in assigned.items() if self.owners[s] is not None]
        fill_slots(self.step.slots, self.step.cache.slot_pages, refills)
        if self.step.cache.states is not None:
            for refill in refills:
                self.step.cache.states.begin_sample(refill.slot, refill.request.group)
        if self.step.changes is not None:
            self.step.changes.fill(refills)

    def next_request(self) -> Request | None:
        """Request whose next sample gets a free slot; None while its prompt is read, or if no
        sample waits.

        While other prompts wait, at most `together_of` samples of one request are in flight, by
        default a quarter: later samples draft from finished ones.
        """
        waiting = [request for request in self.active if request.waiting]
        for request in waiting:
            if len(request.live) < self.together_of(request):
                return request
        if self.queue or self.ahead or self.prefill:
            return self.admit()
        return waiting[0] if waiting else None

    def together_of(self, request: Request) -> int:
        """Largest number of a request's samples in flight while other prompts wait."""
        return self.together or -(-len(request.samples) // 4)

    def assign(self, request: Request, s: int) -> Refill | None:
        """Assign slot s and pages to the request's next sample."""
        index = request.waiting.popleft()
        most = request.params.max_new_tokens
        pages = self.step.cache.take_for_sample(most)
        try:
            live = LiveSample(request, index, pages, self.tokenizer, self.streams(request))
            refill = Refill(s, request, index, in_turn(pages, most))
            if self.step.changes is not None:
                self.step.changes.begin(refill)
        except BaseException:
            self.step.cache.allocator.give_back(pages)
            raise
        request.live[index] = self.owners[s] = live
        return refill

    def streams(self, request: Request) -> bool:
        """True if the texts of the request's samples are read while they are drawn."""
        return self.settings.on_tokens is not None

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
        taken = {r.group for r in (*self.active, *reading, *(p.request for p in self.ahead))}
        group = next(g for g in range(len(self.owners)) if g not in taken)
        request = self.queue.popleft()
        try:
            return Prefill.begin(
                self.step, request, group, next(self.group_keys), self.prefill_chunk
            )
        except BaseException:
            if request.pages:
                self.free_group(request)
            raise

    def read_prompt(self) -> bool:
        """Read as many chunks of the prompt as a step may wait for; True at the prompt's end."""
        assert self.prefill is not None
        while chunk := self.prefill.chunk:
            left = self.prefill_chunk - self.read_tokens
            if chunk > left and self.waited_for:
                return False
            most = min(self.prefill_chunk, self.step.cache.rows)
            if self.waited_for:
                most = min(most, left)
            prefills = [self.prefill, *self.with_it(most - chunk)]
            # count the tokens of all prompts of this pass, before their chunks advance
            self.read_tokens += sum(prefill.chunk for prefill in prefills)
            read_chunks(prefills)
        return True

    @property
    def waited_for(self) -> bool:
        """True if samples in flight wait while prompts are read."""
        return self.steps > 0 and any(self.owners)

    def with_it(self, rows: int) -> Iterator[Prefill]:
        """Prompts whose next chunks, in all at most `rows` tokens, share the current prompt's pass.

        Begins further prompts of the queue, in order, while their first samples have free slots.
        """
        if not reads_several(self.step):
            return
        assert self.prefill is not None
        for prefill in self.ahead:
            if 0 < prefill.chunk <= rows:
                rows -= prefill.chunk
                yield prefill
        begun = [self.prefill.request, *(prefill.request for prefill in self.ahead)]
        free = self.owners.count(None) - sum(map(self.slots_of, begun))
        while self.queue and free > 0 and self.begins_ahead(self.queue[0], rows):
            prefill = self.begin_prefill()
            self.ahead.append(prefill)
            free -= self.slots_of(prefill.request)
            if prefill.chunk:
                rows -= prefill.chunk
                yield prefill

    def begins_ahead(self, request: Request, rows: int) -> bool:
        """True if a request's first chunk has at most `rows` tokens, so another's pass reads it."""
        return min(self.prefill_chunk, len(request.prompt) - 1) <= rows

    def slots_of(self, request: Request) -> int:
        """Number of slots that the request's first samples get."""
        return min(len(request.samples), self.together_of(request))

    def enter_history(self) -> bool:
        """Enter the prompt's past samples, about HISTORY_ROWS rows per step; True at their end."""
        assert self.prefill is not None
        while self.entered_rows < HISTORY_ROWS or not self.steps or not any(self.owners):
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
