"""Samples of a side, and whether they count: most ended by themselves, few n-grams repeat."""

from dataclasses import dataclass
from statistics import mean

# tokens of the runs whose repetition is counted, and the least share of them that differ
RUN, DISTINCT = 8, 0.8
# of samples that ended by themselves
ENDED = 0.5


@dataclass(slots=True)
class Drawn:
    """Samples of one call."""

    tokens: list[list[int]]
    ended: list[bool]  # of each sample, whether an end token ended it
    seconds: float
    tau: float | None = None  # tokens a sample and step, where the side counts steps

    @classmethod
    def cut(cls, tokens: list[list[int]], ends: set[int], seconds: float) -> "Drawn":
        """Each sample up to its first end token."""
        found = [_until_end(sample, ends) for sample in tokens]
        return cls(found, [sample[-1:] != [] and sample[-1] in ends for sample in found], seconds)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def _until_end(sample: list[int], ends: set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(sample) if token in ends), len(sample))
    return sample[:end]


def distinct(samples: list[list[int]]) -> float:
    """Distinct runs of RUN tokens over all of them, each sample's counted for itself."""
    runs = [[tuple(s[i : i + RUN]) for i in range(len(s) - RUN + 1)] for s in samples]
    count = sum(map(len, runs))
    return sum(len(set(found)) for found in runs) / count if count else 1.0


def described(samples: list[list[int]], ended: list[bool]) -> dict:
    """Columns on the samples of a row; `counts`: whether its speed is that of real text."""
    share, differ = mean(ended), distinct(samples)
    return {
        "mean length": mean(map(len, samples)),
        "ended": share,
        "distinct 8-grams": differ,
        "counts": share >= ENDED and differ >= DISTINCT,
    }
