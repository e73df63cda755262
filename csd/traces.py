"""Trace files: recorded samples, a JSON line a prompt, written and read."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from csd.job import Job


@dataclass(slots=True)
class Trace:
    """One line of a trace file."""

    problem: int | str
    prompt: list[int]
    samples: list[list[int]]
    temperature: float
    top: list | None  # [sample][position] of (token ids, probabilities), likeliest first
    seed: int | None = None  # csd's own, which drew the samples
    indices: list[int] | None = None  # of the samples, where csd drew them
    stop_ids: tuple[int, ...] = ()  # tokens that end a sample: nothing is drafted behind them

    @classmethod
    def parse(cls, line: str) -> "Trace":
        data = json.loads(line)
        return cls(
            problem=data.get("problem", 0),
            prompt=data["prompt_ids"],
            samples=data["samples"],
            temperature=data.get("temperature", 1.0),
            top=data.get("top"),
            seed=data.get("seed"),
            indices=data.get("indices"),
            stop_ids=tuple(data.get("stop_ids", ())),
        )


def read_traces(path: str | Path) -> Iterator[Trace]:
    """The traces of a file, which may be gzipped."""
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
        for line in file:
            if line.strip():
                yield Trace.parse(line)


def write_traces(path: str | Path, jobs: list[Job]) -> None:
    """One JSON line a prompt: its ids, its samples, and the target's top 8 at each position.

    With the seed and the samples' indices the noise that drew them can be had again.
    """
    with open(path, "w") as f:
        for job in jobs:
            done = [job.finished[i] for i in job.samples if i in job.top]
            row = {
                "problem": job.index,
                "prompt_ids": job.prompt,
                "samples": [s.tokens for s in done],
                "temperature": job.params.temperature,
                "seed": job.seed,
                "indices": [s.index for s in done],
                "stop_ids": list(job.params.stopping_ids),
                "top": [job.top[s.index] for s in done],
            }
            f.write(json.dumps(row) + "\n")
