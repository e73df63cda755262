"""Slots of a call: reads prompts, gives free slots to samples, and frees them at their end."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from csd.engine.budget import Budget
from csd.engine.call import RunSettings
from csd.engine.cross_prompt_history import CrossPromptHistory
from csd.engine.history_args import longest_first
from csd.engine.prefill import Prefill
from csd.engine.requests import LiveSample, Request
from csd.engine.slot_edits import Refill, clear_slot, fill_slots
from csd.engine.step import Clock, Step
from csd.state.kv_cache import in_turn
from csd.state.pool import PROGRESS_PENALTY

# rows of past samples that are entered between two steps at most
HISTORY_ROWS = 4096


class SlotFiller:
    """Assigns samples to free slots, and reads their prompts.

    lag: steps the host stays behind the device. group_keys: of new groups, never reused.
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
        self.owners: list[LiveSample | None] = [None] * step.slots.count
        self.steps = 0
        self.prefill: Prefill | None = None  # the prompt that is being read
        self.read_tokens = 0  # of prompts, since the last step
        self.entered_rows = 0  # of past samples, since the last step
        self.cross_prompt = CrossPromptHistory() if settings.share == "call" else None
        self.penalises_progress = False  # whether a progress penalty applies

    def fill(self) -> int:
        """Fill free slots; how many hold samples then. None ends the run."""
        self.refill()
        return sum(owner is not None for owner in self.owners)

    def set_progress_penalty(self) -> None:
        """Favour samples that are behind once no sample waits for a slot."""
        last = self.ending()
        if last != self.penalises_progress:
            self.penalises_progress = last
            self.step.slots.progress_penalty.fill_(PROGRESS_PENALTY if last else 0)

    def ending(self) -> bool:
        """True if no sample waits for a slot."""
        return not (self.queue or self.prefill or any(r.waiting for r in self.active))

    def refill(self) -> None:
        """Fill free slots, all of them in one copy to the device."""
        self.read_tokens = self.entered_rows = 0
        refills = []
        for s, owner in enumerate(self.owners):
            if owner is not None:
                continue
            request = self.next_request()
            if request is None:
                break
            refills.append(self.assign(request, s))
        fill_slots(self.step.slots, self.step.cache.slot_pages, refills)
        if self.step.cache.states is not None:
            for refill in refills:
                self.step.cache.states.begin_sample(refill.slot, refill.request.group)
        if self.step.changes is not None:
            self.step.changes.fill(refills)

    def next_request(self) -> Request | None:
        """The request whose next sample gets a free slot; None while its prompt is being read, and
        when none waits.

        While other prompts wait, only so many samples of one are in flight together, by default a
        quarter of them: those that come later draft from finished ones.
        """
        waiting = [request for request in self.active if request.waiting]
        for request in waiting:
            together = self.together or -(-len(request.samples) // 4)
            if len(request.live) < together:
                return request
        if self.queue or self.prefill:
            return self.admit()
        return waiting[0] if waiting else None

    def assign(self, request: Request, s: int) -> Refill:
        """The request's next sample gets slot s and its pages."""
        index = request.waiting.popleft()
        most = request.params.max_new_tokens
        pages = self.step.cache.take_for_sample(most)
        live = LiveSample(request, index, pages, self.tokenizer, self.streams(request))
        request.live[index] = self.owners[s] = live
        return Refill(s, request, index, in_turn(pages, most))

    def streams(self, request: Request) -> bool:
        """True if the texts of its samples are read while they are drawn."""
        return self.settings.on_tokens is not None

    def admit(self) -> Request | None:
        """The next request once its prompt is read; None while it is not, and when none is left.

        Between two steps no more than a chunk's tokens are read, of one prompt or of several short
        ones, so no step waits for more. Before the first step none waits: it has its slots filled.
        """
        if self.prefill is None:
            if not self.queue:
                return None
            taken = {request.group for request in self.active}
            group = next(g for g in range(len(self.owners)) if g not in taken)
            self.prefill = Prefill.begin(
                self.step,
                self.queue.popleft(),
                group,
                next(self.group_keys),
                self.prefill_chunk,
                self.cross_prompt,
            )
        clock = Clock(self.step.seconds)
        if self.read_prompt() and self.enter_history():
            self.prefill.end()
            self.active.append(self.prefill.request)
            self.prefill = None
        clock.lap("prefill")
        return None if self.prefill else self.active[-1]

    def read_prompt(self) -> bool:
        """Read as many chunks of the prompt as a step may wait for; True at its end."""
        assert self.prefill is not None
        while chunk := self.prefill.chunk:
            fits = self.read_tokens + chunk <= self.prefill_chunk
            if not fits and self.steps and any(self.owners):
                return False
            self.read_hidden(self.prefill, self.prefill.read())
            self.read_tokens += chunk
        return True

    def read_hidden(self, prefill: Prefill, hidden: torch.Tensor) -> None:
        """Called with the last hidden states of each chunk of a prompt that has been read."""

    def enter_history(self) -> bool:
        """The same for its past samples."""
        assert self.prefill is not None
        while self.entered_rows < HISTORY_ROWS or not self.steps or not any(self.owners):
            rows = self.prefill.enter_history()
            if not rows:
                return True
            self.entered_rows += rows
        return False

    def free(self, s: int, live: LiveSample) -> None:
        """Slot s and its pages are free."""
        live.done = True
        self.owners[s] = None
        clear_slot(self.step.slots, s)
        self.step.cache.allocator.give_back(live.pages)
        del live.request.live[live.index]
        if live.request.done:
            self.retire(live.request)

    def retire(self, request: Request) -> None:
        """Free the prompt's pages and the graph of a group without samples."""
        if request in self.active:
            self.active.remove(request)
            if not any(other.group == request.group for other in self.active):
                self.free_group(request)

    def free_group(self, request: Request) -> None:
        """The pages of a request's prompt and its group's graph are free."""
        self.step.cache.allocator.give_back(request.pages)
        self.step.slots.group_key[request.group].fill_(-1)
        if self.step.cache.states is not None:
            self.step.cache.states.free_prompt(request.group)


def clear(step: Step) -> None:
    """Free all slots, groups and pages, wherever a call was interrupted."""
    step.slots.live.fill_(False)
    step.slots.progress_penalty.fill_(0)
    step.slots.group.fill_(-1)
    step.slots.group_key.fill_(-1)
    step.cache.reset()
