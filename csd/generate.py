"""`csd.generate` and `csd.stream`: many samples of a prompt, the same ones plain sampling draws."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch

from csd.engine import Engine
from csd.graph.drafters import DRAFTERS, known
from csd.job import Job, OnTokens, Running
from csd.kernels.noise import prompt_key
from csd.progress import Progress
from csd.prompts import parse
from csd.result import Sample, Samples
from csd.sampling import resolve
from csd.traces import write_traces
from csd.vote import Vote

VERIFIERS = ("match", "canonical", "recursive", "kseq")

# what a type checker can tell apart; a tensor is one prompt or many
OnePrompt = str | list[int] | list[dict[str, str]] | list[dict[str, Any]]
ManyPrompts = list[str] | list[list[int]] | list[list[dict[str, str]]]

# one engine a model: by object, as long as the model lives, or by where it was loaded from
_by_model: "weakref.WeakKeyDictionary[Any, Engine]" = weakref.WeakKeyDictionary()
_by_name: dict[tuple, Engine] = {}


@overload
def generate(model: Any, prompt: OnePrompt, **options: Any) -> Samples: ...
@overload
def generate(model: Any, prompt: ManyPrompts, **options: Any) -> list[Samples]: ...
@overload
def generate(model: Any, prompt: torch.Tensor, **options: Any) -> Any: ...
def generate(model: Any, prompt: Any, **options: Any) -> Samples | list[Samples]:
    """Draw `num_samples` answers to each prompt.

    model: a `transformers` model, a local folder, a hub name, a GGUF file or a `csd.Engine`.
    prompt: a str (taken as it is), a list of message dicts (through the tokenizer's chat
        template), or token ids as a list or 1-D tensor. A list of these, or a 2-D tensor with
        `attention_mask`, gives a list of results. A prompt that occurs again continues the sample
        indices of its earlier occurrence.

    Drawing:
        num_samples: 1. first_sample: 0, the first sample's index.
        seed: None draws one from torch's default generator; the result says which.
        temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty: as `transformers`
            defines them; left out, the model's generation config says, else they are off.
    Ending:
        max_new_tokens: 512, cut at the model's context when not given. min_new_tokens: 0.
        stop: strings that end a sample. stop_token_ids: more end tokens. ignore_eos: False.
        until: `csd.Vote(...)`, or a function of the samples of a prompt in the order of their
            indices: asked about the first, the first two, ... as soon as all of them have finished;
            True cancels the rest, so where it stops is the same for every draft and batch.
    Running:
        speculate: True.
        verifier: "match"; "canonical", "recursive" and "kseq" draw their drafts from the graph and
            accept or resample them (`csd.verify`). The law of the samples is the same, but they
            give up the invisibility of drafts: tokens then depend on siblings, batch and budget,
            and a seed repeats them only for the same call with a whole `budget`.
        drafter: "consensus"; for comparison also
            "prompt-lookup", "paper", "paper-tree", "recycling", "rest:PATH", "suffix".
        budget: "auto", or how many drafted tokens a step verifies over all samples.
        tokenizer, device, dtype, revision, chat_template_kwargs.
    Watching:
        progress: True shows a line while running. callback(prompt, sample, new_tokens, text) gets
            each sample's new tokens once per step. record: path of a trace file to write.
            drafts: True keeps what each step drafted in `out[i].drafts`.

    Returns `Samples` (a list of them for a list of prompts). Ctrl-C returns what there is; samples
    that had not finished say `cancelled`.

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument.
    """
    call = _Call(model, prompt, options)
    try:
        for _ in call.run():
            pass
    except KeyboardInterrupt:
        pass
    results = call.results()
    return results if call.many else results[0]


def stream(model: Any, prompt: Any, **options: Any) -> Iterator[tuple[int, Sample]]:
    """As `generate`, but yields (prompt index, Sample) as each sample finishes.

    Closing the iterator cancels the rest and leaves the engine usable. With `until`, samples may
    have been yielded beyond those that decided; `generate` calls them cancelled.
    """
    call = _Call(model, prompt, options)
    return call.run()


def release() -> None:
    """Drop the engines that `generate` keeps, with their caches and the models they loaded."""
    for engine in [*_by_model.values(), *_by_name.values()]:
        engine.release()
    _by_model.clear()
    _by_name.clear()


def engine_for(
    model: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    **_: object,
) -> Engine:
    """The engine `generate` keeps for a model."""
    if isinstance(model, Engine):
        for name, value in (("device", device), ("dtype", dtype), ("revision", revision)):
            if value is not None:
                raise ValueError(f"{name} is set when the Engine is made, got {value!r}")
        return model
    options = dict(tokenizer=tokenizer, device=device, dtype=dtype, revision=revision)
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        key = (str(model), revision, str(device), dtype)
        if key not in _by_name:
            _by_name[key] = Engine(model, **options)
        engine = _by_name[key]
    else:
        if model not in _by_model:
            _by_model[model] = Engine(model, **options)
        engine = _by_model[model]
    if tokenizer is not None:
        engine.tokenizer = tokenizer
    return engine


_OPTIONS = {
    "num_samples", "first_sample", "seed", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids",
    "ignore_eos", "until", "speculate", "drafter", "verifier", "budget", "tokenizer", "device",
    "dtype", "revision", "chat_template_kwargs", "attention_mask", "progress", "callback", "record",
    "drafts",
}  # fmt: skip


class _Call:
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
        self.budget = _budget(options.get("budget", "auto"))
        self.options = options
        count = _count("num_samples", options.get("num_samples", 1), 1)
        until = _called("until", options.get("until"), "csd.Vote() or a function of samples")
        self.until = until.of(count) if isinstance(until, Vote) else until
        _called("callback", options.get("callback"), "a function")
        first = _count("first_sample", options.get("first_sample", 0), 0)
        seed = options.get("seed")
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        elif isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number or None, got {seed!r}")

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


def _budget(budget: Any) -> str | int:
    if budget == "auto":
        return budget
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget must be 'auto' or a whole number, got {budget!r}")
    return _count("budget", budget, 0)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
