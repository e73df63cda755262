"""Calibration of draft probabilities: measured acceptance by drafter and estimate.

Estimates of the graph and of a model are not comparable, and neither is a frequency. For a common
pool each estimate is replaced by its measured acceptance:

    r(kind, p) = (hits + PRIOR p) / (seen + PRIOR)      over tokens of this kind and about this p

A token is counted if the sample reached its parent. Kinds: drafted by the graph, by the model, or
by both; a token of both has the larger estimate. About the last LATEST tokens per bin count.
"""

import math

import torch

GRAPH, MODEL, BOTH = 0, 1, 2
BINS, PRIOR, LATEST = 24, 8.0, 512


def bin_of(p: float) -> int:
    """Bin of p, in half octaves: 0 for p = 1, 2 for p = 1/2."""
    return min(int(-2 * math.log2(max(p, 1e-9))), BINS - 1)


class Reliability:
    """Number of accepted tokens (hits) and of counted tokens (seen), per kind and bin."""

    def __init__(self) -> None:
        self.hits = [[0.0] * BINS for _ in range(3)]
        self.seen = [[0.0] * BINS for _ in range(3)]

    def __call__(self, kind: int, p: float) -> float:
        """Calibrated probability that the token is sampled at its parent."""
        at = bin_of(p)
        return (self.hits[kind][at] + PRIOR * p) / (self.seen[kind][at] + PRIOR)

    def learn(self, kind: int, p: float, hit: bool) -> None:
        at = bin_of(p)
        self.hits[kind][at] += hit
        self.seen[kind][at] += 1
        if self.seen[kind][at] > LATEST:
            self.hits[kind][at] /= 2
            self.seen[kind][at] /= 2


class DeviceReliability:
    """`Reliability` of a model alone, on the device: float64 counts at fixed addresses."""

    def __init__(self, device: torch.device):
        self.hits, self.seen = torch.zeros(2, BINS, dtype=torch.float64, device=device)

    def forget(self) -> None:
        self.hits.zero_()
        self.seen.zero_()

    def __call__(self, p: torch.Tensor) -> torch.Tensor:
        """Calibrated probabilities, float64, of estimates of any shape."""
        at = self._bin(p)
        return (self.hits[at] + PRIOR * p) / (self.seen[at] + PRIOR)

    def learn(self, p: torch.Tensor, tested: torch.Tensor, hit: torch.Tensor) -> None:
        """Count tested tokens [M], and those of them that were sampled (hit [M]).

        The counts are integers, so their sums are exact in any order.
        """
        bins = torch.arange(BINS, device=p.device)
        mine = (self._bin(p)[:, None] == bins) & tested[:, None]
        self.hits.add_((mine & hit[:, None]).sum(0))
        self.seen.add_(mine.sum(0))
        half = torch.where(self.seen > LATEST, 0.5, 1.0)
        self.hits.mul_(half)
        self.seen.mul_(half)

    @staticmethod
    def _bin(p: torch.Tensor) -> torch.Tensor:
        """`bin_of` on the device."""
        return (-2 * p.clamp(min=1e-9).log2()).long().clamp(max=BINS - 1)


class Levels:
    """Measured share of nodes with an accepted draw, by depth."""

    def __init__(self) -> None:
        self.hits: list[float] = []
        self.seen: list[float] = []

    def __call__(self, depth: int) -> float:
        """Expected share, 0.6 before any observation."""
        if depth >= len(self.seen):
            return 0.6
        return (self.hits[depth] + 0.6 * PRIOR) / (self.seen[depth] + PRIOR)

    def learn(self, depth: int, hit: bool) -> None:
        more = depth + 1 - len(self.seen)
        self.hits += [0.0] * more
        self.seen += [0.0] * more
        self.hits[depth] += hit
        self.seen[depth] += 1
        if self.seen[depth] > LATEST:
            self.hits[depth] /= 2
            self.seen[depth] /= 2
