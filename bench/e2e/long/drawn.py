"""Samples of a side. A row counts if at least half of them ended and few n-grams repeat."""

from dataclasses import dataclass
from statistics import mean

# length of the n-grams whose repetition is counted, and the least share of distinct ones
RUN, DISTINCT = 8, 0.8
# least share of samples that ended with an end token
ENDED = 0.5


@dataclass(slots=True)
class Drawn:
    """Samples of one call, and its seconds."""

    tokens: list[list[int]]
    ended: list[bool]  # per sample, True if an end token ended it
    seconds: float
    tau: float | None = None  # tokens per sample and step, if the side counts steps

    @classmethod
    def cut(cls, tokens: list[list[int]], ends: set[int], seconds: float) -> "Drawn":
        """Make a `Drawn` of samples that are cut after their first end token."""
        bodies = [_until_end(sample, ends) for sample in tokens]
        return cls(bodies, [sample[-1:] != [] and sample[-1] in ends for sample in bodies], seconds)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def _until_end(sample: list[int], ends: set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(sample) if token in ends), len(sample))
    return sample[:end]


def distinct(samples: list[list[int]]) -> float:
    """Share of distinct RUN-grams among all, counted within each sample; 1 without any."""
    runs = [[tuple(s[i : i + RUN]) for i in range(len(s) - RUN + 1)] for s in samples]
    count = sum(map(len, runs))
    return sum(len(set(run)) for run in runs) / count if count else 1.0


def described(samples: list[list[int]], ended: list[bool]) -> dict:
    """Columns on the samples of a row; `counts` is True if they represent real text."""
    share, differ = mean(ended), distinct(samples)
    return {
        "mean length": mean(map(len, samples)),
        "ended": share,
        "distinct 8-grams": differ,
        "counts": share >= ENDED and differ >= DISTINCT,
    }
