"""Scheduler of one engine call: fills slots, runs steps, and yields finished samples.

`SlotFiller` reads prompts, assigns free slots to samples, and frees slots at their end.
`no_token_left` is the error of a sample without a token to draw, with the names of the constraints
that ban all tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from csd.engine.call import RunSettings
from csd.engine.options.grammar import GRAMMARS, dead_parts
from csd.engine.options.params import SamplingParams
from csd.engine.requests.history import longest_first
from csd.engine.requests.request import LiveSample, Request
from csd.engine.requests.slot_edits import Refill, clear_slot, fill_slots
from csd.engine.results.record import PendingRecord, Record
from csd.engine.results.result import Sample, Until
from csd.engine.step.budget import Budget
from csd.engine.step.prefill import Prefill, read_chunks, reads_several, units_of
from csd.engine.step.step import Clock, Step
from csd.engine.step.thread_choice import ThreadChoice
from csd.state.kv_cache import in_turn
from csd.state.pool import PROGRESS_PENALTY
from csd.state.prefix_cache import PrefixIndex
from csd.state.verdict import LENGTH, STOP

# once this many rows of past samples are entered between two steps, the rest waits
HISTORY_ROWS = 4096


class SlotFiller:
    """Assigns samples to free slots, and reads their prompts.

    lag: launched steps whose records may be unread. group_keys: keys of new groups, never reused.
    threads: chooses the threads of each step. expected: seconds of a step by its number of rows.
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
        threads: ThreadChoice | None = None,
        expected: Callable[[int], float] = lambda rows: 1.0,
    ):
        self.step, self.settings, self.budget = step, settings, budget
        self.tokenizer, self.prefill_chunk = tokenizer, prefill_chunk
        self.together, self.lag, self.group_keys = together, lag, group_keys
        self.threads, self.expected = threads or ThreadChoice(fixed=True), expected
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
        with self.threads.chosen():
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
        default one: later samples draft from finished ones.
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
        return self.together or 1

    def assign(self, request: Request, s: int) -> Refill | None:
        """Assign slot s and pages to the request's next sample."""
        index = request.waiting.popleft()
        max_new = request.params.max_new_tokens
        pages = self.step.cache.take_for_sample(max_new)
        try:
            live = LiveSample(request, index, pages, self.tokenizer, self.streams(request))
            refill = Refill(s, request, index, in_turn(pages, max_new))
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
        # the longest beginning that is in the graph already
        known = self.enters_graph(
            request, [*self.active, *reading, *(p.request for p in self.ahead)]
        )
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
            prefills = [self.prefill, *self.with_it(rows - chunk)]
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
        """True if a request's first chunk has at most `rows` tokens, so another's pass reads it,
        and no prompt that is being read will have more of its beginning."""
        units, index = units_of(self.step, request, self.prefill_chunk), self.prefix_index
        if index is not None and request.units and len(units) < len(request.units):
            missing = request.units[len(units)]
            reading = [self.prefill] if self.prefill else []
            if any(prefill.will_keep(missing) for prefill in (*reading, *self.ahead)):
                return False
        left = len(request.prompt) - 1 - len(units) * (index.tokens if index else 0)
        return min(self.prefill_chunk, left) <= rows

    @property
    def prefix_index(self) -> PrefixIndex | None:
        return self.step.cache.allocator.index

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


REASONS = {STOP: "stop", LENGTH: "length"}


class Scheduler(SlotFiller):
    """Runs the steps of a call.

    A sample that cannot continue ends alone, with the reason "error" and the tokens before that
    place. So neither its tokens nor the others' depend on the number of tokens per step.
    """

    def run(self) -> Iterator[tuple[Request, Sample]]:
        """Run steps until no slot holds a sample; yields each sample as it finishes.

        Unless the settings return errors, a sample that could not continue is not yielded; the
        error of the first such sample, by prompt and index, is raised at the end.
        """
        records: deque[PendingRecord] = deque()
        while owned := self.fill():
            live_count = self.step.count_live(owned)
            if live_count:
                self.steps += 1
                self.set_progress_penalty()
                with self.threads.step() as timer:
                    pending = self.step.launch(live_count, self.budget, self.owners, self.steps)
                    timer.expected = self.expected(pending.rows)
                records.append(pending)
            # if no slot is live on the device, only records remain to be read
            while records and (len(records) > self.lag or not live_count):
                record = self.step.read(records.popleft())
                self.budget.update(sum(n > 0 for n in record.nodes), record)
                yield from self.postprocess(record)
        if self.failed and not self.settings.returns_errors:
            # a rule that ended a prompt may have left out the samples with errors
            errors = [(r.index, i) for r in self.failed for i in r.errors]
            if errors:
                index, i = min(errors)
                raise next(r.errors[i] for r in self.failed if r.index == index and i in r.errors)

    def postprocess(self, record: Record) -> Iterator[tuple[Request, Sample]]:
        """Append a step's tokens to their samples; yields the samples that finished."""
        seen: set[int] = set()
        for s, live in enumerate(record.owners):
            if live is not None and not live.done and record.nodes[s]:
                yield from self.advance(live, record, s, seen)

    def advance(
        self, live: LiveSample, record: Record, s: int, seen: set[int]
    ) -> Iterator[tuple[Request, Sample]]:
        """`postprocess` of slot s; seen: indices of prompts with samples in earlier slots."""
        request = live.request
        if request.fault is not None:
            if not self.settings.returns_errors:
                raise request.fault
            request.error = str(request.fault) or type(request.fault).__name__
            yield from self.cancel(request)
            return
        had = len(live.tokens)
        count, error = record.count[s], None
        if record.bad[s]:
            count, error = self.broken(live, record, s)
        self.append(live, record, s, count)
        stats = request.stats
        new = len(live.tokens) - had
        stats.tokens += new
        stats.sample_steps += 1
        stats.steps += request.index not in seen
        seen.add(request.index)
        stats.nodes_proposed += record.nodes[s] - 1
        for source in live.sources[had:]:
            if source:
                stats.accepted[source] += 1
                stats.nodes_accepted += 1
        reason = REASONS.get(record.finish[s]) if error is None else "error"
        if live.stopped:
            reason, error = "stop", None
        sample, text = live.result(reason) if reason else (None, live.take_text())
        if sample is not None:
            # stored before anything else, so that an interrupt loses no sample
            if error is None:
                request.top[live.index] = live.top
            else:
                sample.error, request.errors[live.index] = str(error), error
                self.failed.append(request)
            request.finished[live.index] = sample
            stats.thoughts_cut += any(sample.forced)
        if self.settings.on_tokens is not None:
            self.settings.on_tokens(request, live, live.tokens[had:], text)
        if sample is not None:
            self.free(s, live)
            if error is None or self.settings.returns_errors:
                yield request, sample
            yield from self.check_until(request)
            if request.done:
                self.learn(request)

    def learn(self, request: Request) -> None:
        """Add the answers of a prompt whose samples have ended to a prior that learns."""
        priors, drafter = self.settings.priors, self.step.drafter
        prior = priors[request.prior_part] if priors else None
        if prior is None or not prior.learn:
            return
        whole = ("stop", "length")
        ended = {i: s for i, s in request.finished.items() if s.finish_reason in whole}
        tops = [top for i in ended if (top := request.top.get(i))]
        # probabilities are recorded for all samples or for none
        top = tops if len(tops) == len(ended) else None
        prior.add(request.prompt, [s.tokens for s in ended.values()], top)
        if drafter is not None:
            drafter.use_prior(prior, request.prior_part)

    def broken(self, live: LiveSample, record: Record, s: int) -> tuple[int, Exception]:
        """Number of tokens in `record` of the sample in slot s before the place where it cannot
        continue, and the error: no token left, or NaN."""
        changes, had = self.step.changes, len(live.tokens)
        position, none_left = (-1, False) if changes is None else changes.emptied(s)
        count = position - had
        if position < 0:
            raw = record.raw_logprobs[s][: record.count[s]]
            count = next((i for i, x in enumerate(raw) if x != x), 0)
        tokens, name = live.tokens + record.tokens[s][:count], self.name_of(live.request)
        if none_left:
            vocab = self.step.decoder.config.vocab
            return count, no_token_left(live, tokens, self.tokenizer, vocab, name)
        functions = live.request.params.logits_processor
        return count, FloatingPointError(
            f"{'logits_processor or the model' if functions else 'the model'} returned NaN or "
            f"infinite logits after {len(tokens)} tokens of sample {live.index} of {name}"
        )

    def name_of(self, request: Request) -> str:
        """Name of a request's prompt in error messages."""
        return f"prompt {request.index}"

    def append(self, live: LiveSample, record: Record, s: int, n: int) -> None:
        """Append the first n tokens of slot s in `record` to its sample, with values and drafts."""
        live.note(record.measured, s, n)
        had = len(live.tokens)
        live.append(
            record.tokens[s][:n],
            record.logprobs[s][:n],
            record.raw_logprobs[s][:n],
            record.sources[s][:n],
        )
        new = live.tokens[had:]
        live.steps += [record.step] * len(new)
        if record.trees is not None:
            live.drafts.append(record.trees.draft(s, record.step, had))
        if record.top is not None:
            live.top += zip(record.top[0][s][: len(new)], record.top[1][s], strict=False)

    def check_until(self, request: Request) -> Iterator[tuple[Request, Sample]]:
        """Call `until` with the finished prefix; cancel and yield the rest if it returns true."""
        until = self.until(request)
        if until is not None and request.satisfies(until):
            yield from self.cancel(request)

    def until(self, request: Request) -> Until | None:
        """The rule that may end a request before its last sample; None: none."""
        return self.settings.until

    def cancel(self, request: Request, texts: bool = True) -> Iterator[tuple[Request, Sample]]:
        """Cancel a request's unfinished samples and yield them; texts: whether they get a text."""
        rest = [s for s in request.result(texts) if s.index not in request.finished]
        request.finished |= {sample.index: sample for sample in rest}
        for s, live in enumerate(self.owners):
            if live is not None and live.request is request:
                self.free(s, live)
        request.waiting.clear()
        self.retire(request)
        for sample in rest:
            yield request, sample


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def no_token_left(
    live: LiveSample, tokens: list[int], tokenizer: Any, vocab: int, prompt: str
) -> ValueError:
    """Returns the error of a sample that has no token to draw after `tokens`.

    prompt: name of the prompt in the message.
    """
    request = live.request
    names = _names(request.params, request.prompt, tokens, vocab)
    remedy = ""
    if names == ["json_schema"]:
        parts = dead_parts(request.params, tokenizer, vocab, tokens)
        if parts:
            names = [f"json_schema at {' and '.join(parts)}"]
            remedy = f": no text fits the schema from here on; remove {parts[-1]} or change it"
    return ValueError(
        f"{' and '.join(names)} banned all tokens after {len(tokens)} tokens of sample "
        f"{live.index} of {prompt}{remedy}"
    )


def _names(params: SamplingParams, prompt: list[int], tokens: list[int], vocab: int) -> list[str]:
    """Names of the constraints that together ban all tokens, in the order of `_bans`."""
    left, names = set(range(vocab)), []
    for name, banned in _bans(params, prompt, tokens, vocab):
        if left & banned:
            left -= banned
            names.append(name)
        if not left:
            return names
    # the other bans depend on the logits or on the state of a grammar
    others = [name for name in ("logits_processor", *GRAMMARS) if getattr(params, name)]
    return [*names, *(others or ["the model's own -inf"])]


def _bans(
    params: SamplingParams, prompt: list[int], tokens: list[int], vocab: int
) -> Iterator[tuple[str, set[int]]]:
    """Yield each constraint's name and the tokens it bans after a prompt and sample tokens."""
    before = prompt + tokens
    yield "logit_bias", {token for token, bias in params.logit_bias if bias == float("-inf")}
    yield (
        "bad_words",
        {
            word[-1]
            for word in params.bad_words
            if len(word) == 1 or before[1 - len(word) :] == [*word[:-1]]
        },
    )
    if params.allowed_token_ids is not None:
        yield "allowed_token_ids", set(range(vocab)) - {*params.allowed_token_ids}
    yield "suppress_tokens", {*params.suppress_tokens}
    if len(tokens) < params.min_new_tokens:
        yield "min_new_tokens", {*params.end_ids}
    n = params.no_repeat_ngram_size
    if n:
        last = before[len(before) - n + 1 :]
        starts = range(len(before) - n + 1)
        yield (
            "no_repeat_ngram_size",
            {before[i + n - 1] for i in starts if before[i : i + n - 1] == last},
        )
