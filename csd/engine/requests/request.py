"""Host side of a call: a `Request` asks for samples of a prompt, a `LiveSample` is in a slot.

`Progress` has a request's samples from waiting to finished, `Placement` its place while in flight.

A call that ends in an error attaches its samples to the error (`Carrying`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from csd.engine.options.grammar import has_grammar
from csd.engine.options.open_thought import Front, open_thoughts
from csd.engine.options.params import SamplingParams
from csd.engine.options.thinking import PAIRS, ThinkingBudget, forced_places
from csd.engine.results.logprobs import Measures, PromptScores
from csd.engine.results.record import SOURCES, Draft, Record
from csd.engine.results.result import Sample, Samples, Until
from csd.engine.results.stats import Stats
from csd.graph.history import PastSample
from csd.kernels.common.noise import prompt_key
from csd.models.fused.config import ModelSizes
from csd.models.text.streamed import SampleText
from csd.traces.receipt import Receipt
from csd.utils.arguments import LARGEST
from csd.utils.torch_state import calling


@dataclass(slots=True)
class Placement:
    """Place of a request in flight, which slots give it (`csd/engine/slots.py`)."""

    group: int = -1
    pages: list[int] = field(default_factory=list)  # of its prompt
    units: list[bytes] | None = None  # digests of the prompt's units in the prefix index
    graph_key: int = -1  # of the group's graph
    # equal for requests in flight whose samples may share rows: those of equal prompts in a scope
    text: int = -1


@dataclass(slots=True)
class Progress:
    """Samples of a request, from waiting to finished, and what else is known of it."""

    samples: range  # the sample indices to draw
    waiting: deque[int] = field(init=False)  # indices without a slot
    live: dict[int, "LiveSample"] = field(default_factory=dict)  # by sample index
    finished: dict[int, Sample] = field(default_factory=dict)  # by sample index
    awaited: set[int] = field(default_factory=set)  # sample indices that another request draws
    top: dict = field(default_factory=dict)  # sample index -> (ids, probabilities) per token
    checked: int = 0  # length of the longest prefix that `until` has been called with
    decided: bool = False  # whether `until` has ended it
    fault: BaseException | None = None  # raised in a step by what this request alone asks for
    error: str | None = None  # reason why the request is not served, or not to its end
    errors: dict[int, Exception] = field(default_factory=dict)  # of samples that cannot continue
    scores: PromptScores | None = None  # if requested: of the prompt's tokens read so far
    # whether the prompt leaves a thought open, once it was read: one that has the tags of
    # templates, and one that its budget counts
    in_thought: bool | None = None
    in_budget: bool = False
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.waiting = deque(self.samples)

    @property
    def done(self) -> bool:
        return not (self.waiting or self.live or self.awaited)

    def whole(self, until: Until | None) -> bool:
        """True if all samples have ended, those included that `until` has cancelled, and none in an
        error."""
        if not self.done or len(self.finished) < len(self.samples) or self.errors:
            return False
        # an error may have come between the last sample's end and the decision
        return until is None or self.decided or self.checked == len(self.samples)

    def prefix(self) -> list[Sample]:
        """Finished samples before the first unfinished index.

        The order in which samples finish depends on their lengths, so `until` sees only this
        prefix.
        """
        return [self.finished[i] for i in takewhile(self.finished.__contains__, self.samples)]

    def satisfies(self, until: Until | None) -> bool:
        """True if `until` is satisfied; it is called with each longer prefix in turn.

        The number of samples that finish at once depends on the batch. The shortest prefix that
        satisfies `until` does not, so samples that finished beyond it are cancelled like the rest.
        """
        if until is None:
            return False
        prefix = self.prefix()
        while self.checked < len(prefix):
            self.checked += 1
            with calling("until"):
                ends = _is_true(until(prefix[: self.checked]))
            if ends:
                self.decided = True
                for i in self.samples[self.checked :]:
                    if i in self.finished:
                        self.errors.pop(i, None)
                        self.finished[i] = replace(
                            self.finished[i], finish_reason="cancelled", error=None
                        )
                return True
        return False


def _is_true(answer: Any) -> bool:
    try:
        return bool(answer)
    # arrays of several values and decisions of a vote have no truth
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"until must return True or False, got a {type(answer).__name__}: {error}"
        ) from error


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the samples that are asked for.

    place, progress: where it lies while it is in flight, and what has come of it.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    samples: range  # the sample indices to draw
    seed: int
    key: int  # key of the noise
    history: list[PastSample] = field(default_factory=list)  # past samples, newest first
    receipt: Receipt | None = None  # of the call that records its samples, without these
    # prompts of one scope use each other's pages; None: the prompt is read whole and not kept
    scope: str | None = ""
    # requests in flight with the same object draft for each other, whatever their prompts
    graph: Any = None
    prior_part: int = 0  # part of the prior's table that it drafts from
    answered: int = 0  # tokens at the prompt's end that are its answer's, of earlier turns
    stops_in_thought: bool = True  # whether stop strings count within the sample's thought
    matcher: Any = None  # of its grammar, in its initial state; None: the step compiles it
    tokenizer: Any = None  # passed on to `Samples`, whose views decode tokens
    streams: bool = False  # whether texts of samples are read while they are drawn
    measures: Measures | None = None  # of a step's measured values, those to keep; None: all
    name: str = ""  # of the prompt, in messages
    place: Placement = field(default_factory=Placement)
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.name or f"prompt {self.index}"
        self.progress = Progress(self.samples)
        self.progress.stats.prompt_tokens = len(self.prompt)

    @classmethod
    def of(
        cls, index: int, prompt: list[int], params: SamplingParams, samples: range, seed: int
    ) -> "Request":
        """Make a request, whose noise key is computed from the seed and the prompt."""
        if samples.stop > LARGEST + 1:
            raise ValueError(
                "first_sample must leave room for the samples, whose indices are at most "
                f"{LARGEST}, got {samples.start} with {len(samples)} samples of prompt {index}"
            )
        return cls(index, prompt, params, samples, seed, prompt_key(seed, prompt))

    def drawing(self, samples: range, seed: int, graph: Any, answered: int) -> "Request":
        """This request, before its start, with other samples, seed, graph and tokens of the answer;
        without any samples if it is refused."""
        error, scores = self.progress.error, self.progress.scores
        samples = samples if error is None else range(samples.start, samples.start)
        key = prompt_key(seed, self.prompt)
        own = dict(seed=seed, key=key, graph=graph, answered=answered, place=Placement())
        made = replace(self, samples=samples, **own)
        made.progress.error, made.progress.scores = error, scores
        return made

    def cut_history(self, count: int) -> None:
        """Keep the first `count` past samples, and count the kept and the left-out tokens."""
        stats = self.progress.stats
        stats.history_left_out += sum(map(len, self.history[count:]))
        self.history = self.history[:count]
        stats.history_tokens = sum(map(len, self.history))

    def find_thought(self, tokenizer: Any) -> None:
        """Find once whether the prompt leaves a thought open."""
        progress = self.progress
        if progress.in_thought is None:
            progress.in_thought, progress.in_budget = open_thoughts(
                self.prompt, self.answered, self.params.thinking_tags, tokenizer
            )

    def result(self, texts: bool = True) -> Samples:
        """All samples; unfinished ones are `cancelled` and keep the tokens drawn so far.

        texts: whether unfinished samples get a text.
        """
        progress = self.progress
        # an interrupt may have come while a sample was neither waiting nor live
        every = {i: Sample(i, None, [], [], [], "cancelled") for i in self.samples}
        every |= {i: live.result("cancelled", texts)[0] for i, live in progress.live.items()}
        every |= progress.finished
        samples = [every[i] for i in self.samples]
        error = progress.error or next((s.error for s in samples if s.error is not None), None)
        return Samples(
            samples,
            self.seed,
            self.prompt,
            progress.stats,
            error,
            None if progress.scores is None else [None, *progress.scores.logprobs],
            self.tokenizer,
        )


def check_served(requests: list[Request], config: ModelSizes) -> None:
    """Raises ValueError if a prompt and its new tokens no longer fit the model, which may change
    after the arguments are checked, for example between `stream` and its first sample."""
    for request in requests:
        length = len(request.prompt) + request.params.max_new_tokens
        if max(request.prompt) >= config.vocab or length > config.context:
            raise ValueError(
                f"the model was changed after the call was made: prompt {request.index} must lie "
                f"in the vocabulary of {config.vocab} and have at most {config.context} tokens "
                f"with its samples, got token ids up to {max(request.prompt)} and {length} tokens"
            )


class LiveSample:
    """Host copy of a sample in flight, which may be some steps older than the device's state."""

    def __init__(self, request: Request, index: int, pages: list[int], tokenizer: Any):
        self.request = request
        self.index = index
        self.pages = pages
        self.done = False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.sources: list[str] = []
        self.steps: list[int] = []  # the step that committed each token
        self.drafts: list[Draft] = []
        self.top: list[tuple[list[int], list[float]]] = []
        self.likely: list[list[tuple[int, float]]] = []
        self.entropies: list[float] = []
        self.stopped = False  # True once a stop string is complete
        self._text: SampleText | None = None
        request.find_thought(tokenizer)
        if tokenizer is not None:
            params = request.params
            front = Front(PAIRS, bool(request.progress.in_thought))
            self._text = SampleText(
                tokenizer,
                params.stop,
                include_stop=params.include_stop,
                skip_special_tokens=params.skip_special_tokens,
                streams=request.streams,
                prompt=request.prompt,
                answer=None if request.stops_in_thought else front.answer,
            )

    def append(self, record: Record, s: int, n: int) -> None:
        """Append the first n tokens of slot s in a step's record, with values and drafts, up to the
        token that completes a stop string."""
        self._measure(record.measured, s, n)
        had = len(self.tokens)
        drawn = record.logprobs[s], record.raw_logprobs[s], record.sources[s]
        for token, logprob, raw, source in zip(record.tokens[s][:n], *drawn, strict=False):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.raw_logprobs.append(raw)
            self.sources.append(SOURCES[source])
            if self._text is not None and self._text.push(token):
                self.stopped = True
                break
        new = len(self.tokens) - had
        self.steps += [record.step] * new
        if record.trees is not None:
            self.drafts.append(record.trees.draft(s, record.step, had))
        if record.top is not None:
            self.top += zip(record.top[0][s][:new], record.top[1][s], strict=False)

    def _measure(self, measured: dict[str, list], s: int, count: int) -> None:
        """Append measured values at the first `count` positions of slot s, as far as the request
        asks for them."""
        asked = self.request.measures
        if "likely_token" in measured and (asked is None or asked.top):
            pairs = zip(measured["likely_token"][s], measured["likely_logprob"][s], strict=True)
            listed = [[*zip(*pair, strict=True)] for pair in pairs]
            self.likely += [row[: None if asked is None else asked.top] for row in listed[:count]]
        if "entropy" in measured and (asked is None or asked.entropy):
            self.entropies += measured["entropy"][s][:count]

    def take_text(self) -> str:
        """Text that has become final since the last call, if texts are streamed; else empty."""
        return "" if self._text is None else self._text.take()

    def result(self, reason: str, with_text: bool = True) -> tuple[Sample, str]:
        """Returns the sample, and the rest of its text that `take_text` has not returned."""
        if reason == "cancelled":
            self._even()
        stop_reason: str | int | None = None
        if self._text is not None and self.stopped:
            stop_reason = self._text.stop_string
        elif reason == "stop":
            stop_reason = self.tokens[-1]
        text, rest = None, ""
        if self._text is not None and with_text:
            text, rest = self._text.finish(by_token=isinstance(stop_reason, int))
        sample = Sample(
            self.index,
            text,
            self.tokens,
            self.logprobs,
            self.raw_logprobs,
            reason,
            stop_reason,
            self.sources,
            self.steps,
            self.drafts,
            self._forced(),
            # measured values are appended before their tokens
            self.likely[: len(self.tokens)],
            self.entropies[: len(self.tokens)],
            bool(self.request.progress.in_thought),
        )
        return sample, rest

    def _forced(self) -> list[bool]:
        params = self.request.params
        limit, tags = params.max_thinking_tokens, params.thinking_tags
        if limit is None or tags is None:
            return []
        request, once = self.request, has_grammar(params)
        budget = ThinkingBudget(tags, limit, request.prompt, request.progress.in_budget, once)
        return forced_places(budget, self.tokens)

    def _even(self) -> None:
        """Cut all lists to one length: an interrupt may have come in the middle of an append."""
        own = self.tokens, self.logprobs, self.raw_logprobs
        lists: list[list] = [*own, self.sources, self.steps]
        shortest = min(map(len, lists))
        for values in lists:
            del values[shortest:]
        if self._text is not None:
            self._text.keep(shortest)


# called once per step for each live sample with its new tokens and their text
OnTokens = Callable[[Request, LiveSample, list[int], str], None]


class Carrying:
    """Context that sets an attribute `samples` on an error, once a sample has begun.

    Its value is the result of the call: a list with the `Samples` of each request, or if not
    `many`, those of the only request. Unfinished samples are `cancelled`.
    """

    # no @contextmanager: contextlib sets attributes of the error, which its class may forbid
    def __init__(self, requests: Sequence[Request], many: bool = True):
        self._requests, self._many = requests, many

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        begun = any(r.progress.live or r.progress.finished for r in self._requests)
        if error is None or isinstance(error, GeneratorExit) or not begun:
            return
        try:
            results = [request.result() for request in self._requests]
        except BaseException:
            # the tokenizer may have caused the error, possibly by a panic: decode no texts
            results = [request.result(texts=False) for request in self._requests]
        with suppress(Exception):
            object.__setattr__(error, "samples", results if self._many else results[0])


def every(acts: Sequence[Callable[[], Any]]) -> None:
    """Call each function in order, whether or not an earlier one has raised."""
    with ExitStack() as stack:
        for act in reversed(acts):
            stack.callback(act)
