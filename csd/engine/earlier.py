"""The `history` of a call: earlier samples given to its requests, and its own kept afterwards."""

import os
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from csd.engine.carry import every
from csd.engine.requests import Request
from csd.engine.result import Sample, Samples
from csd.engine.traces.history import History
from csd.graph.history import Earlier

_EXPECTED = "must be a csd.History or a list of earlier samples (token ids, texts or Samples)"


def check_history(history: Any) -> None:
    """Raises TypeError for what is no history, ValueError for a closed one."""
    if history is None or isinstance(history, list | tuple | Samples):
        return
    if not isinstance(history, History):
        raise TypeError(f"history {_EXPECTED}, got {type(history).__name__}")
    if history.closed:
        raise ValueError("history is closed; open it again with csd.History(path=...)")


def check_apart(history: Any, record: str | PathLike[str] | None) -> None:
    """Raises ValueError where a history's file is also to be replaced by a recording."""
    if record is None or not isinstance(history, History):
        return
    record_file = Path(os.path.realpath(record))
    if history.files & {record_file, Path(f"{record_file}.new")}:
        raise ValueError(f"record must be another file than those of history, got {record!r}")


def give_history(
    requests: Sequence[Request], history: Any, many: bool, tokenizer: Any, vocab: int
) -> None:
    """Each request gets the earlier samples of its prompt.

    history: a `History`; or the earlier samples of the one prompt; or where `many`, a list of
    these, one entry a prompt, in which None is none.

    Raises TypeError or ValueError naming the entry that cannot be served.
    """
    check_history(history)
    if history is None:
        return
    if isinstance(history, History):
        for request in requests:
            request.history = history.of(request.prompt)
            for earlier in request.history:
                _check_vocabulary(earlier, vocab, "history")
        return
    if not many:
        requests[0].history = _samples(history, requests[0].prompt, tokenizer, vocab, "history")
        return
    if isinstance(history, Samples) or len(history) != len(requests):
        count = "one" if isinstance(history, Samples) else len(history)
        raise ValueError(
            f"history must have an entry for each of {len(requests)} prompts, got {count}"
        )
    for i, (request, given) in enumerate(zip(requests, history, strict=True)):
        name = f"history[{i}]"
        request.history = _samples(given, request.prompt, tokenizer, vocab, name)


def keeps_top(history: Any) -> bool:
    """Whether it asks for the target's top 8 at each token."""
    return isinstance(history, History) and history.top


def keep_history(requests: Sequence[Request], history: Any) -> None:
    """Add what a call has drawn, its finished samples, to its `History`."""
    if not isinstance(history, History):
        return
    groups: dict[tuple[int, ...], list[Request]] = {}
    for request in requests:
        groups.setdefault(tuple(request.prompt), []).append(request)
    additions = []
    # one addition a prompt, however often the call had it
    for prompt, members in groups.items():
        done = [
            (request, request.finished[i])
            for request in members
            for i in request.samples
            if i in request.finished and request.finished[i].finish_reason != "cancelled"
        ]
        tops = [request.top.get(sample.index) for request, sample in done]
        additions.append(partial(
            history.add,
            prompt,
            [sample.tokens for _, sample in done],
            tops if history.top and all(tops) else None,
            temperature=members[0].params.temperature,
            seed=members[0].seed,
            indices=[sample.index for _, sample in done],
            stop_ids=members[0].params.stopping_ids,
        ))  # fmt: skip
    every(additions)


def _samples(
    given: Any, prompt: list[int], tokenizer: Any, vocab: int, name: str
) -> list[Earlier]:
    """Earlier samples of one prompt, newest first."""
    if given is None:
        return []
    if isinstance(given, Samples):
        if given.prompt_ids != prompt:
            raise ValueError(f"{name} must be samples of the same prompt, got another prompt's")
        given = list(given)
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} {_EXPECTED}, got {type(given).__name__}")
    found: list[Earlier] = []
    for i, entry in enumerate(given):
        where = f"{name}[{i}]"
        if isinstance(entry, Samples):
            found += _samples(entry, prompt, tokenizer, vocab, where)[::-1]
            continue
        earlier = Earlier.of(_ids(entry, tokenizer, where))
        _check_vocabulary(earlier, vocab, where)
        found.append(earlier)
    return found[::-1]


def _ids(entry: Any, tokenizer: Any, name: str) -> list[int]:
    if isinstance(entry, Sample):
        return entry.tokens
    if isinstance(entry, str):
        if tokenizer is None:
            raise ValueError(f"{name} is text, but there is no tokenizer: pass tokenizer=")
        return tokenizer(entry, add_special_tokens=False)["input_ids"]
    if torch.is_tensor(entry) and entry.dim() == 1 and not entry.is_floating_point():
        entry = entry.tolist()
    if not isinstance(entry, list | tuple) or not all(
        isinstance(t, int) and not isinstance(t, bool) for t in entry
    ):
        raise TypeError(f"{name} must be a sample's token ids or its text, got {entry!r:.80}")
    # before 32 bits are too few for one
    if entry and (max(entry) >= 1 << 31 or min(entry) < 0):
        raise ValueError(f"{name} must hold token ids, got {min(entry)} to {max(entry)}")
    return list(entry)


def _check_vocabulary(earlier: Earlier, vocab: int, name: str) -> None:
    ids = [earlier.tokens, *(earlier.top[:1] if earlier.top else ())]
    highest = max((int(x.max()) for x in ids if x.size), default=0)
    lowest = int(earlier.tokens.min()) if len(earlier) else 0
    if highest >= vocab or lowest < 0:
        found = highest if highest >= vocab else lowest
        raise ValueError(f"{name} has token id {found}, outside the vocabulary of {vocab}")
