"""One call of `csd.generate` or `csd.stream`: what it was given, checked, and the running of it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from csd import arguments
from csd.engine import Engine
from csd.graph.drafters import DRAFTERS, known
from csd.job import Job, OnTokens, Running
from csd.kept_engines import engine_for
from csd.kernels.noise import prompt_key
from csd.progress import Progress
from csd.prompts import parse
from csd.result import Sample, Samples
from csd.sampling import resolve
from csd.traces import write_traces
from csd.verify.sampler import DRAWS
from csd.vote import Vote

VERIFIERS = ("match", *DRAWS)

_OPTIONS = {
    "num_samples", "first_sample", "seed", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids",
    "ignore_eos", "until", "speculate", "drafter", "verifier", "budget", "tokenizer", "device",
    "dtype", "revision", "chat_template_kwargs", "attention_mask", "progress", "callback", "record",
    "drafts",
}  # fmt: skip


class Call:
    """One call of `generate` or `stream`, with its arguments checked."""

    def __init__(self, model: Any, prompt: Any, options: dict):
        try:
            self._check(model, prompt, options)
        except Exception as error:
            if isinstance(model, Engine):
                model._refused(error)
            raise

    def _check(self, model: Any, prompt: Any, options: dict) -> None:
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError(
                f"unknown argument {unknown[0]!r}; known are {', '.join(sorted(_OPTIONS))}"
            )
        _choice("verifier", options.get("verifier", "match"), VERIFIERS)
        drafter = options.get("drafter")
        if drafter is not None and not known(drafter):
            _choice("drafter", drafter, DRAFTERS)
        self.budget = arguments.budget(options.get("budget", "auto"))
        self.options = options
        count = arguments.whole("num_samples", options.get("num_samples", 1), 1)
        until = _called("until", options.get("until"), "csd.Vote() or a function of samples")
        self.until = until.of(count) if isinstance(until, Vote) else until
        _called("callback", options.get("callback"), "a function")
        first = arguments.whole("first_sample", options.get("first_sample", 0), 0)
        seed = options.get("seed")
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        arguments.seed(seed)

        self.engine = engine_for(model, **options)
        config = self.engine.config
        prompts, self.many = parse(
            prompt,
            self.engine.tokenizer,
            config.vocab,
            options.get("attention_mask"),
            options.get("chat_template_kwargs"),
        )
        params = resolve(
            self.engine.generation_config,
            context=config.context,
            longest_prompt=max(map(len, prompts)),
            vocab=config.vocab,
            **options,
        )
        if params.stop and self.engine.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= or stop_token_ids")
        if isinstance(until, Vote) and self.engine.tokenizer is None:
            raise ValueError("until=csd.Vote() needs a tokenizer, got None: pass tokenizer=")
        taken: dict[tuple, int] = {}
        self.jobs = []
        for i, ids in enumerate(prompts):
            start = taken.get(tuple(ids), first)
            taken[tuple(ids)] = start + count
            samples = range(start, start + count)
            self.jobs.append(Job(i, ids, params, samples, seed, prompt_key(seed, ids)))

    def run(self) -> Iterator[tuple[int, Sample]]:
        progress = Progress(self.jobs, bool(self.options.get("progress")))
        callback = self.options.get("callback")
        record = self.options.get("record")
        run = self.engine.run(
            self.jobs,
            budget=self.budget,
            speculate=self.options.get("speculate", True),
            drafter=self.options.get("drafter"),
            verifier=self.options.get("verifier", "match"),
            until=self.until,
            on_tokens=_on_tokens(callback, progress),
            record_top=record is not None,
            drafts=bool(self.options.get("drafts")),
        )
        try:
            for job, sample in run:
                progress.finished()
                yield job.index, sample
        finally:
            run.close()
            progress.close()
            if record is not None:
                write_traces(record, self.jobs)

    def results(self) -> list[Samples]:
        return [job.result() for job in self.jobs]


def _on_tokens(callback: Callable | None, progress: Progress) -> OnTokens | None:
    if callback is None and not progress.shown:
        return None

    def on_tokens(job: Job, running: Running, tokens: list[int], text: str) -> None:
        progress.tokens()
        if callback is not None:
            callback(job.index, running.index, tokens, text)

    return on_tokens


def _called(name: str, value: Any, expected: str) -> Any:
    # a class, as in until=csd.Vote, would be made of samples in place of asked about them
    callable_ = callable(value) and not isinstance(value, type)
    if value is not None and not callable_ and not isinstance(value, Vote):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    return value


def _choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
