"""The loop of an engine's run: plan, step, events; it yields finished samples.

`no_token_left` is the error of a sample without a token to draw, with the names of the constraints
that ban all tokens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from csd.engine.call import RunSettings
from csd.engine.options.grammar import GRAMMARS, dead_parts
from csd.engine.options.params import SamplingParams
from csd.engine.plan import Advanced, Ended, Event, Failed, StepPolicy
from csd.engine.requests.request import LiveSample, Request
from csd.engine.results.record import PendingRecord, Record
from csd.engine.results.result import Sample
from csd.engine.slots import HostSlots
from csd.engine.step.budget import Budget
from csd.engine.step.thread_choice import ThreadChoice
from csd.state.pool import PROGRESS_PENALTY
from csd.state.verdict import LENGTH, STOP

REASONS = {STOP: "stop", LENGTH: "length"}


class Scheduler:
    """Runs the steps that a policy plans over the slots, and gives their tokens to the samples.

    A sample that cannot continue ends alone, with the reason "error" and the tokens before that
    place. So neither its tokens nor the others' depend on the number of tokens per step.

    lag: launched steps whose records may be unread. threads: chooses the threads of each step.
    expected: seconds of a step by its number of rows.
    """

    def __init__(
        self,
        policy: StepPolicy,
        slots: HostSlots,
        settings: RunSettings,
        *,
        budget: Budget,
        lag: int,
        threads: ThreadChoice,
        expected: Callable[[int], float],
    ):
        self.policy, self.slots, self.step = policy, slots, slots.step
        self.settings, self.budget, self.lag = settings, budget, lag
        self.threads, self.expected = threads, expected
        self.failed: list[Request] = []  # with samples that could not continue
        self.penalises_progress = False  # True while a progress penalty applies

    def run(self) -> Iterator[tuple[Request, Sample]]:
        """Run steps until the policy plans no more; yields each sample as it finishes.

        Unless the settings return errors, a sample that could not continue is not yielded; the
        error of the first such sample, by prompt and index, is raised at the end.
        """
        records: deque[PendingRecord] = deque()
        while (plan := self.policy.plan(self.slots.view())) is not None:
            with self.threads.chosen():
                events = self.slots.apply(plan)
            yield from self.note(events)
            if plan.read or events:
                continue
            live_count = self.slots.fill()
            if live_count:
                records.append(self.launch(live_count, plan.ending))
            # if no slot is live on the device, only records remain to be read
            while records and (len(records) > self.lag or not live_count):
                record = self.step.read(records.popleft())
                self.budget.update(sum(n > 0 for n in record.nodes), record)
                yield from self.note(self.read(record))
        if self.failed and not self.settings.returns_errors:
            # a rule that ended a prompt may have left out the samples with errors
            errors = {(r.index, i): e for r in self.failed for i, e in r.progress.errors.items()}
            if errors:
                raise errors[min(errors)]

    def launch(self, live_count: int, ending: bool) -> PendingRecord:
        """Launch a step; ending: whether shorter samples are favoured, since none waits."""
        self.slots.steps += 1
        if ending != self.penalises_progress:
            self.penalises_progress = ending
            self.step.slots.progress_penalty.fill_(PROGRESS_PENALTY if ending else 0)
        with self.threads.step():
            owners, steps = self.slots.owners, self.slots.steps
            pending = self.step.launch(live_count, self.budget, owners, steps)
            self.threads.expected = self.expected(pending.snapshot.rows)
        return pending

    def note(self, events: Iterable[Event]) -> Iterator[tuple[Request, Sample]]:
        """Pass events to the policy; yields the samples that ended."""
        for event in events:
            if isinstance(event, Ended):
                self.learn(event)
            self.policy.note(event)
            if isinstance(event, Advanced):
                sample = event.sample
                if sample is not None and (sample.error is None or self.settings.returns_errors):
                    yield event.request, sample
            elif isinstance(event, Ended):
                for sample in event.rest:
                    yield event.request, sample

    def read(self, record: Record) -> list[Event]:
        """Append a step's tokens to their samples, and free the slots of those that ended."""
        events: list[Event] = []
        seen: set[int] = set()
        for s, live in enumerate(record.owners):
            if live is None or live.done or not record.nodes[s]:
                continue
            try:
                events.append(self.advance(live, record, s, seen))
            # an error of a tokenizer, whose panic is a BaseException
            except BaseException as error:
                events.append(Failed(live.request, error, live.index))
        return events

    def advance(self, live: LiveSample, record: Record, s: int, seen: set[int]) -> Advanced:
        """`read` of slot s; seen: indices of prompts with samples in earlier slots."""
        request = live.request
        if request.progress.fault is not None:
            raise request.progress.fault
        had = len(live.tokens)
        count, error = record.count[s], None
        if record.bad[s]:
            count, error = self.broken(live, record, s)
        live.append(record, s, count)
        stats = request.progress.stats
        new = len(live.tokens) - had
        stats.tokens += new
        stats.sample_steps += 1
        stats.steps += request.index not in seen
        seen.add(request.index)
        stats.rows += record.model_rows[s]
        # given tokens are no drafts
        stats.nodes_proposed += record.nodes[s] - 1 if self.settings.forcing is None else 0
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
                request.progress.top[live.index] = live.top
            else:
                sample.error, request.progress.errors[live.index] = str(error), error
                self.failed.append(request)
            request.progress.finished[live.index] = sample
            stats.thoughts_cut += any(sample.forced)
            self.slots.free(s, live)
        return Advanced(request, live, live.tokens[had:], text, sample)

    def learn(self, ended: Ended) -> None:
        """Add the answers of a prompt that has ended to a prior that learns.

        Those of a prompt that was cancelled, or that drew none itself, are left out.
        """
        request, priors, drafter = ended.request, self.settings.priors, self.step.drafter
        prior = priors[request.prior_part] if priors else None
        if prior is None or not prior.learn or not request.progress.stats.tokens:
            return
        if ended.rest and not request.progress.decided:
            return
        whole = ("stop", "length")
        drawn = {i: s for i, s in request.progress.finished.items() if s.finish_reason in whole}
        tops = [top for i in drawn if (top := request.progress.top.get(i))]
        # probabilities are recorded for all samples or for none
        top = tops if len(tops) == len(drawn) else None
        prior.add(request.prompt, [s.tokens for s in drawn.values()], top)
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
        tokens = live.tokens + record.tokens[s][:count]
        if none_left:
            vocab = self.step.decoder.config.vocab
            return count, no_token_left(live, tokens, self.slots.tokenizer, vocab)
        request = live.request
        of = "logits_processor or the model" if request.params.logits_processor else "the model"
        return count, FloatingPointError(
            f"{of} returned NaN or infinite logits after {len(tokens)} tokens of sample "
            f"{live.index} of {request.name}"
        )


def no_token_left(live: LiveSample, tokens: list[int], tokenizer: Any, vocab: int) -> ValueError:
    """Returns the error of a sample that has no token to draw after `tokens`."""
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
        f"{live.index} of {request.name}{remedy}"
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
    ends = [
        word for word in params.bad_words if before[len(before) + 1 - len(word) :] == [*word[:-1]]
    ]
    yield "bad_words", {word[-1] for word in ends}
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
