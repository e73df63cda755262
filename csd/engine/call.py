"""One call of `generate` or `stream`: its checked arguments, as requests to an engine.

`Bar` shows the progress of a call, in tokens.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from csd.engine.options.params import limited, resolve
from csd.engine.requests.history import check_apart, set_history, store_history, wants_top
from csd.engine.requests.request import LiveSample, OnTokens, Request, every
from csd.engine.results.logprobs import Measures, PromptScores
from csd.engine.results.result import Sample, Samples, Until, UntilRule
from csd.graph.prior import Prior
from csd.graph.teacher_forcing import TeacherForcing
from csd.kernels.ops import Ops
from csd.models.fused.config import TextSizes
from csd.models.text.prompts import parse, truncate
from csd.traces.history import History
from csd.traces.receipt import with_logprobs
from csd.traces.traces import Trace, open_traces, write_traces
from csd.utils.files import WholeFile
from csd.utils.phases import can_write, wants_progress
from csd.utils.torch_state import calling, plain_torch

# shortest time between two updates of the bar
SECONDS = 0.1


class Bar:
    """Bar of drawn tokens, out of the most that samples can have; appears with the first tokens."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests
        self._most = sum(len(r.samples) * r.params.max_new_tokens for r in requests)
        self._samples = sum(len(r.samples) for r in requests)
        self._ended = 0
        self._shown = 0.0  # time of the last update of the bar
        self._bar: tqdm | None = None
        self._off = not can_write()

    def show(self, now: bool = False) -> None:
        """Update the bar, at most every `SECONDS` unless `now`.

        Called once per step for each sample with new tokens.
        """
        clock = time.perf_counter()
        if self._off or (not now and clock - self._shown < SECONDS):
            return
        self._shown = clock
        try:
            self._update()
        # a standard error that no one reads any more
        except (OSError, ValueError):
            self._off = True

    def _update(self) -> None:
        if self._bar is None:
            self._bar = tqdm(desc="csd: sampling", total=self._most, unit="token", unit_scale=True)
        drawn = sum(r.progress.stats.tokens for r in self._requests)
        steps = sum(r.progress.stats.sample_steps for r in self._requests)
        shown = {"samples": f"{self._ended}/{self._samples}", "tau": f"{drawn / max(steps, 1):.2f}"}
        if any(r.history for r in self._requests):
            from_history = sum(r.progress.stats.accepted["history"] for r in self._requests)
            shown["history"] = f"{from_history / max(drawn, 1):.0%}"
        self._bar.total = self._most
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(drawn - self._bar.n)

    def end_sample(self, request: Request, sample: Sample) -> None:
        """Subtract the tokens that an ended sample did not draw from the bar's total."""
        self._ended += 1
        self._most -= request.params.max_new_tokens - len(sample.tokens)
        self.show(now=True)

    def close(self) -> None:
        """Show the last state, and end the line."""
        if self._bar is not None and not self._off:
            with suppress(OSError, ValueError):
                self._bar.refresh()
                self._bar.close()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of the requests of one call."""

    budget: str | int = "auto"
    speculate: bool = True
    drafter: Any = None  # None: the engine's default
    verifier: str = "match"
    prior: Prior | None = None  # n-grams of answers to other prompts, for drafts
    own_priors: Mapping[str, Prior] = field(default_factory=dict)  # by owner, in its place
    until: Until | None = None
    on_tokens: OnTokens | None = None
    record_top: bool = False  # record the target's 8 likeliest tokens at each position
    drafts: bool = False  # record each step's draft trees
    measures: Measures = field(default_factory=Measures)  # at each position of the samples
    # makes, from the operations and the rows of a step, the teacher forcing that replaces sampling
    forcing: Callable[[Ops, int], TeacherForcing] | None = None
    returns_errors: bool = False  # samples that cannot continue are results, not an error
    tokenizer: Any = None
    progress: bool | None = False  # as in `csd.utils.phases.wants_progress`

    @property
    def priors(self) -> list[Prior]:
        """Priors by part of the drafter's table (`Request.prior_part`); none without drafts."""
        if self.prior is None or not self.speculate:
            return []
        return [self.prior, *self.own_priors.values()]


@dataclass(slots=True)
class Call:
    """Checked arguments of a call."""

    requests: list[Request]
    settings: RunSettings
    many: bool  # whether the prompt was a list of prompts
    count: int = 1  # samples per prompt
    bar: Bar | None = None  # shown while the call runs
    record: str | Path | None = None  # path of the trace file to write at the end
    file: WholeFile | None = None  # that file, open while the call runs
    history: Any = None  # if a `History`, gets the samples at the end
    is_recorded: bool = False  # whether its samples get a receipt

    @classmethod
    @plain_torch()
    def read(
        cls,
        prompt: Any,
        options: Mapping[str, Any],
        config: TextSizes,
        generation_config: Any,
        tokenizer: Any,
    ) -> "Call":
        """Make the requests of a call for a model; options: as `read_options` returns them.

        Raises TypeError or ValueError that names the argument.
        """
        if options["tokenizer"] is not None:
            tokenizer = options["tokenizer"]
        settings = _settings(options, tokenizer)
        requests, many = _requests(prompt, options, config, generation_config, tokenizer)
        history = options["history"]
        check_apart(history, options["record"])
        set_history(requests, history, many, tokenizer, config.vocab)
        if settings.prior is not None:
            settings.prior.check_use(tokenizer, config.vocab)
        bar = Bar(requests) if wants_progress(options["progress"]) else None
        settings = replace(settings, on_tokens=_on_tokens(options["callback"], bar))
        count, record = options["num_samples"], options["record"]
        return cls(
            requests,
            settings,
            many,
            count,
            bar,
            record,
            history=history,
            is_recorded=record is not None,
        )

    def refused(self) -> Iterator[tuple[Request, Sample]]:
        """Samples of the prompts that cannot be served, each with its prompt's error."""
        for request in self.requests:
            error, start = request.progress.error, request.samples.start
            for i in range(start, start + self.count) if error is not None else ():
                yield request, Sample(i, None, [], [], [], "error", error=error)

    def results(self) -> list[Samples]:
        """Results of all prompts; unfinished samples are `cancelled`."""
        return [request.result() for request in self.requests]

    def open(self) -> None:
        """Check, before the first step, that the history and the trace file can be written.

        Raises OSError or ValueError, naming the file.
        """
        if isinstance(self.history, History):
            self.history.check()
        if self.record is not None:
            self.file = open_traces(self.record)

    def close(self) -> None:
        """Write the trace file, store the history and end the bar, also after an error."""
        every(
            [
                self._write_record,
                lambda: store_history(self.requests, self.history),
                self.bar.close if self.bar is not None else lambda: None,
            ]
        )

    def _write_record(self) -> None:
        if self.file is None:
            return
        with self.file as file:
            # without finished samples, an existing file stays as it is
            if any(request.progress.finished for request in self.requests):
                write_traces(file, map(trace_of, self.requests))


def _requests(
    prompt: Any,
    options: Mapping[str, Any],
    config: TextSizes,
    generation_config: Any,
    tokenizer: Any,
) -> tuple[list[Request], bool]:
    """Requests of a call's prompts, and whether the prompt was a list of prompts."""
    limit, returns = options["truncate_prompt"], options["on_error"] == "return"
    errors: dict[int, Exception] = {}
    prompts, many = parse(
        prompt,
        tokenizer,
        config.vocab,
        options["attention_mask"],
        options["chat_template_kwargs"],
        # a prompt that is truncated may have any length
        config.context if limit is None else None,
        errors if returns else None,
    )
    prompts = [ids if limit is None else truncate(ids, limit, tokenizer) for ids in prompts]
    unlimited = resolve(generation_config, options, vocab=config.vocab, tokenizer=tokenizer)
    # arguments that are invalid for any prompt are an error of the whole call
    params = limited(unlimited, config.context)
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer: pass tokenizer= or stop_token_ids")
    seed, count = options["seed"], options["num_samples"]
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    taken: dict[tuple[int, ...], int] = {}  # next free sample index of each prompt
    requests = []
    for i, ids in enumerate(prompts):
        if i not in errors:
            try:
                name = f"prompt {i}" if many else "the prompt"
                params = limited(unlimited, config.context, len(ids), name)
            except ValueError as error:
                if not returns:
                    raise
                errors[i] = error
        start = taken.get(tuple(ids), options["first_sample"])
        samples = range(start, start + count if i not in errors else start)
        taken[tuple(ids)] = samples.stop
        request = Request.of(i, ids, params, samples, seed)
        request.progress.error = str(errors[i]) if i in errors else None
        request.tokenizer = tokenizer
        if options["prompt_logprobs"]:
            request.progress.scores = PromptScores()
        requests.append(request)
    return requests, many


def _settings(options: Mapping[str, Any], tokenizer: Any) -> RunSettings:
    """Settings of a call, without `on_tokens`; checks the arguments that do not go together."""
    history, prior, until = options["history"], options["prior"], options["until"]
    if isinstance(until, UntilRule):
        if until.needs_text and tokenizer is None:
            name = type(until).__name__
            raise ValueError(f"until=csd.{name}() needs a tokenizer, got None: pass tokenizer=")
        until = until.of(options["num_samples"])
    for name in ("history", "prior"):
        if options[name] is not None and options["verifier"] != "match":
            raise ValueError(
                f"{name} needs verifier='match', whose tokens do not depend on drafts, got "
                f"verifier={options['verifier']!r}"
            )
    return RunSettings(
        budget=options["budget"],
        speculate=options["speculate"],
        drafter=options["drafter"],
        verifier=options["verifier"],
        prior=prior,
        until=until,
        record_top=options["record"] is not None or wants_top(history),
        drafts=options["drafts"],
        measures=Measures(options["top_logprobs"], options["entropy"]),
        returns_errors=options["on_error"] == "return",
        tokenizer=tokenizer,
        progress=options["progress"],
    )


def trace_of(request: Request) -> Trace:
    drawn = request.progress.top.keys() & request.progress.finished.keys()
    done = [request.progress.finished[i] for i in request.samples if i in drawn]
    receipt = request.receipt
    if receipt is not None:
        receipt = with_logprobs(receipt, (s.logprobs for s in done))
    return Trace(
        problem=request.index,
        prompt=request.prompt,
        samples=[s.tokens for s in done],
        temperature=request.params.temperature,
        top=[request.progress.top[s.index] for s in done],
        seed=request.seed,
        indices=[s.index for s in done],
        stop_ids=request.params.end_ids,
        receipt=receipt,
    )


def _on_tokens(callback: Any, bar: Bar | None) -> OnTokens | None:
    if callback is None and bar is None:
        return None

    def on_tokens(request: Request, live: LiveSample, tokens: list[int], text: str) -> None:
        if bar is not None:
            bar.show()
        if callback is not None:
            with calling("callback"):
                callback(request.index, live.index, tokens, text)

    return on_tokens
