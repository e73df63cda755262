"""The argument `history`: past samples for a call's requests, and its update afterwards."""

import os
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from csd.engine.options.checks import SAMPLES_EXPECTED
from csd.engine.requests.request import Request, every
from csd.engine.results.result import UNFINISHED, Sample, Samples
from csd.graph.history import PastSample
from csd.models.text.context import encode_behind
from csd.traces.history import History


def check_apart(history: Any, record: str | PathLike[str] | None) -> None:
    """Raises ValueError if `record` would replace a file of the history."""
    if record is None or not isinstance(history, History):
        return
    record_file = Path(os.path.realpath(record))
    if history.files & {record_file, Path(f"{record_file}.new")}:
        raise ValueError(f"record must be another file than that of history, got {record!r}")


def set_history(
    requests: Sequence[Request], history: Any, many: bool, tokenizer: Any, vocab: int
) -> None:
    """Set each request's `history` to the past samples of its prompt.

    history: a `History`; or the past samples of the only prompt; or if `many`, a list with one
    such entry per prompt, None for a prompt without past samples.

    Raises TypeError or ValueError that names the entry that cannot be served.
    """
    if history is None:
        return
    if isinstance(history, History):
        for request in requests:
            request.history = history.of(request.prompt)
            for past in request.history:
                _check_vocabulary(past, vocab, "history")
        return
    entries = {"history": history}
    if many and (isinstance(history, Samples) or len(history) != len(requests)):
        count = "one" if isinstance(history, Samples) else len(history)
        raise ValueError(
            f"history must have one entry for each of {len(requests)} prompts, got {count}"
        )
    if many:
        entries = {f"history[{i}]": entry for i, entry in enumerate(history)}
    for request, (name, entry) in zip(requests, entries.items(), strict=True):
        request.history = _past_samples(entry, request.prompt, tokenizer, vocab, name)


def wants_top(history: Any) -> bool:
    """True if a history stores the target's 8 likeliest tokens at each position."""
    return isinstance(history, History) and history.top


def store_history(requests: Sequence[Request], history: Any) -> None:
    """Add the finished samples of a call to its `History`."""
    if not isinstance(history, History):
        return
    groups: dict[tuple[int, ...], list[Request]] = {}
    for request in requests:
        groups.setdefault(tuple(request.prompt), []).append(request)
    additions = []
    # one addition per prompt, even if the prompt occurs several times in the call
    for prompt, members in groups.items():
        done = [
            (request, sample)
            for request in members
            for i in request.samples
            if (sample := request.progress.finished.get(i)) is not None
            if sample.finish_reason not in UNFINISHED
        ]
        tops = [request.progress.top.get(sample.index) for request, sample in done]
        additions.append(
            partial(
                history.add,
                prompt,
                [sample.tokens for _, sample in done],
                tops if history.top and all(tops) else None,
                temperature=members[0].params.temperature,
                seed=members[0].seed,
                indices=[sample.index for _, sample in done],
                stop_ids=members[0].params.end_ids,
            )
        )
    every(additions)


def longest_first(requests: Sequence[Request]) -> list[Request]:
    """Sort the requests by descending mean length of their past samples.

    A call ends with its last sample, so a long one should not start last. A prompt without history
    counts as an average one. Results do not depend on the order.
    """
    lengths = {id(r): sum(map(len, r.history)) / len(r.history) for r in requests if r.history}
    if not lengths:
        return list(requests)
    average = sum(lengths.values()) / len(lengths)
    return sorted(requests, key=lambda r: -lengths.get(id(r), average))


def _past_samples(
    samples: Any, prompt: list[int], tokenizer: Any, vocab: int, name: str
) -> list[PastSample]:
    """Read the past samples of one prompt, oldest first; returns them newest first."""
    if samples is None:
        return []
    if isinstance(samples, Samples):
        if samples.prompt_ids != prompt:
            raise ValueError(
                f"{name} must have samples of the same prompt, got samples of another prompt"
            )
        samples = list(samples)
    if not isinstance(samples, list | tuple):
        raise TypeError(f"{name} {SAMPLES_EXPECTED}, got {type(samples).__name__}")
    past: list[PastSample] = []
    for i, entry in enumerate(samples):
        where = f"{name}[{i}]"
        if isinstance(entry, Samples):
            past += _past_samples(entry, prompt, tokenizer, vocab, where)[::-1]
            continue
        past.append(PastSample.of(_ids(entry, prompt, tokenizer, where)))
        _check_vocabulary(past[-1], vocab, where)
    return past[::-1]


def _ids(entry: Any, prompt: list[int], tokenizer: Any, name: str) -> list[int]:
    if isinstance(entry, Sample):
        return entry.tokens
    if isinstance(entry, str):
        if tokenizer is None:
            raise ValueError(f"{name} is text, but there is no tokenizer: pass tokenizer=")
        ids, joined = encode_behind(tokenizer, prompt, entry)
        # only drafts are made of it, so the text may be encoded alone
        return tokenizer(entry, add_special_tokens=False)["input_ids"] if joined else ids
    if torch.is_tensor(entry) and entry.dim() == 1 and not entry.is_floating_point():
        entry = entry.tolist()
    if not isinstance(entry, list | tuple) or not all(
        isinstance(t, int) and not isinstance(t, bool) for t in entry
    ):
        raise TypeError(f"{name} must be the token ids or the text of a sample, got {entry!r:.80}")
    # check before the conversion to 32 bits, which could overflow
    if entry and (max(entry) >= 1 << 31 or min(entry) < 0):
        raise ValueError(
            f"{name} must hold token ids, got numbers from {min(entry)} to {max(entry)}"
        )
    return list(entry)


def _check_vocabulary(past: PastSample, vocab: int, name: str) -> None:
    ids = [past.tokens, *(past.top[:1] if past.top else ())]
    highest = max((int(x.max()) for x in ids if x.size), default=0)
    lowest = int(past.tokens.min()) if len(past) else 0
    if highest >= vocab or lowest < 0:
        wrong = highest if highest >= vocab else lowest
        raise ValueError(f"{name} has token id {wrong}, outside the vocabulary of {vocab}")
