"""Draws of the integrations: prompts as groups, or rows with equal rows as one group."""

from collections.abc import Callable, Mapping
from typing import Any

from csd.engine.call import RunSettings
from csd.engine.carry import Carrying
from csd.engine.engine import Engine
from csd.engine.history_args import set_history, store_history, wants_top
from csd.engine.requests import Request
from csd.engine.result import Sample, Samples
from csd.engine.sampling import SamplingParams
from csd.engine.traces.history import History
from csd.schema.arguments import check_budget, check_seed, check_share, check_whole


def draw(
    engine: Engine,
    prompts: list[tuple[list[int], SamplingParams, range]],
    *,
    seed: int,
    history: Any = None,
    keep: bool = True,
    **running: Any,
) -> list[Samples]:
    """Draw samples of each (token ids, parameters, sample indices), one group per prompt.

    Without sample indices a prompt is not read.

    history: as `csd.generate` has it for a list of prompts. keep: whether a `History` also gets
        what is drawn.
    running: `budget`, `speculate`, `drafter`, `share`, `on_tokens`, as
        `csd.engine.call.RunSettings` has them.

    Raises TypeError or ValueError for a seed, a budget, a share or a first sample that is none. An
    error after the first step has what was drawn until then as its `samples`.
    """
    check_seed(seed)
    check_budget(running.get("budget", "auto"))
    check_share(running.get("share"))
    for _, _, samples in prompts:
        check_whole("first_sample", samples.start, 0)
    requests = [
        Request.of(i, ids, params, samples, seed)
        for i, (ids, params, samples) in enumerate(prompts)
    ]
    set_history(requests, history, True, engine.tokenizer, engine.config.vocab)
    settings = RunSettings(record_top=wants_top(history), **running)
    kept = history if keep and isinstance(history, History) else None
    if kept is not None:
        kept.check()
    with Carrying(requests):
        try:
            for _ in engine.run([r for r in requests if r.samples], settings):
                pass
        finally:
            store_history(requests, kept)
        return [request.result() for request in requests]


def draw_rows(
    engine: Engine,
    rows: list[list[int]],
    params: SamplingParams,
    *,
    seed: int,
    first_sample: int | Mapping[tuple[int, ...], int] = 0,
    budget: str | int = "auto",
    speculate: bool = True,
    on_tokens: Callable | None = None,
    history: History | None = None,
    share: str | None = None,
    keep: bool = True,
) -> list[Sample]:
    """Draw one sample for each row, in the order of `rows`.

    rows: token ids without padding. Rows that are equal, adjacent or not, are one group: they share
        its prompt's keys and values and its graph, and take consecutive sample indices.
    first_sample: the index of each group's first sample, or one index for each distinct row.
    on_tokens: as `csd.engine.call.RunSettings` has it. history, keep, share: as of `draw`.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(tuple(row), []).append(i)
    prompts = []
    for ids, places in members.items():
        first = first_sample[ids] if isinstance(first_sample, Mapping) else first_sample
        check_whole("first_sample", first, 0)
        prompts.append((list(ids), params, range(first, first + len(places))))
    results = draw(
        engine, prompts, seed=seed, budget=budget, speculate=speculate, on_tokens=on_tokens,
        history=history, share=share, keep=keep,
    )  # fmt: skip
    drawn: dict[int, Sample] = {}
    for places, samples in zip(members.values(), results, strict=True):
        drawn.update(zip(places, samples, strict=True))
    return [drawn[i] for i in range(len(rows))]
