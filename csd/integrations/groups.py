"""What the integrations draw: prompts as groups, and rows where equal ones are one group."""

from collections.abc import Callable, Mapping
from typing import Any

from csd import arguments
from csd.engine import Engine
from csd.job import Job
from csd.kernels.noise import prompt_key
from csd.result import Sample, Samples
from csd.sampling import SamplingParams


def draw(
    engine: Engine,
    prompts: list[tuple[list[int], SamplingParams, range]],
    *,
    seed: int,
    **running: Any,
) -> list[Samples]:
    """The samples of each (token ids, parameters, sample indices), each prompt a group of its own.

    running: `budget`, `speculate`, `drafter`, `on_tokens`, as `Engine.run` takes them.

    Raises TypeError or ValueError for a seed, a budget or a first sample that is none.
    """
    arguments.seed(seed)
    arguments.budget(running.get("budget", "auto"))
    for _, _, samples in prompts:
        arguments.whole("first_sample", samples.start, 0)
    jobs = [
        Job(i, ids, params, samples, seed, prompt_key(seed, ids))
        for i, (ids, params, samples) in enumerate(prompts)
    ]
    for _ in engine.run(jobs, **running):
        pass
    return [job.result() for job in jobs]


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
) -> list[Sample]:
    """One sample for each row, in the order of `rows`.

    rows: token ids without padding. Rows that are equal, adjacent or not, are one group: they share
        its prompt's keys and values and its graph, and take consecutive sample indices.
    first_sample: the index of each group's first sample, or one index for each distinct row.
    on_tokens: as `Engine.run` takes it.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(tuple(row), []).append(i)
    prompts = []
    for ids, places in members.items():
        first = first_sample[ids] if isinstance(first_sample, Mapping) else first_sample
        arguments.whole("first_sample", first, 0)
        prompts.append((list(ids), params, range(first, first + len(places))))
    results = draw(
        engine, prompts, seed=seed, budget=budget, speculate=speculate, on_tokens=on_tokens
    )
    drawn: dict[int, Sample] = {}
    for places, samples in zip(members.values(), results, strict=True):
        drawn.update(zip(places, samples, strict=True))
    return [drawn[i] for i in range(len(rows))]
