"""Scheduler of one engine call: fills slots, runs steps, and yields finished samples."""

from collections import deque
from collections.abc import Iterator

from csd.engine.no_token_left import no_token_left
from csd.engine.requests import LiveSample, Request, Until
from csd.engine.result import Sample
from csd.engine.slot_filler import SlotFiller
from csd.engine.step_record import PendingRecord, Record
from csd.state.verdict import LENGTH, STOP

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
                records.append(self.step.launch(live_count, self.budget, self.owners, self.steps))
            # if no slot is live on the device, only records remain to be read
            while records and (len(records) > self.lag or not live_count):
                record = self.step.read(records.popleft())
                self.budget.learn(sum(n > 0 for n in record.nodes), record)
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
        prior, drafter = self.settings.prior, self.step.drafter
        if prior is None or not prior.learn:
            return
        whole = ("stop", "length")
        ended = {i: s for i, s in request.finished.items() if s.finish_reason in whole}
        tops = [top for i in ended if (top := request.top.get(i))]
        # probabilities are recorded for all samples or for none
        top = tops if len(tops) == len(ended) else None
        prior.add(request.prompt, [s.tokens for s in ended.values()], top)
        if drafter is not None:
            drafter.use_prior(prior)

    def broken(self, live: LiveSample, record: Record, s: int) -> tuple[int, Exception]:
        """Number of tokens in `record` of the sample in slot s before the place where it cannot
        continue, and the error: no token left, or NaN."""
        changes, had = self.step.changes, len(live.tokens)
        place, none_left = (-1, False) if changes is None else changes.emptied(s)
        count = place - had
        if place < 0:
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
