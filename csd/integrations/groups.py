"""Rows of token ids as groups: equal rows are samples of one prompt, wherever they stand."""

from collections.abc import Callable, Mapping

from csd.engine import Engine
from csd.job import Job
from csd.kernels.noise import prompt_key
from csd.result import Sample
from csd.sampling import SamplingParams


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
    jobs = []
    for prompt, places in members.items():
        first = first_sample if isinstance(first_sample, int) else first_sample[prompt]
        samples = range(first, first + len(places))
        ids = list(prompt)
        jobs.append(Job(len(jobs), ids, params, samples, seed, prompt_key(seed, ids)))
    for _ in engine.run(jobs, budget=budget, speculate=speculate, on_tokens=on_tokens):
        pass
    drawn: list[Sample] = [None] * len(rows)
    for job, places in zip(jobs, members.values(), strict=True):
        for place, sample in zip(places, job.result(), strict=True):
            drawn[place] = sample
    return drawn
