"""How often a drafted token was sampled where it was expected with p: measured, by who drafted it.

Estimates of the graph and of a model are of different kinds, and neither is a frequency. Their
common pool needs one measure, so each is replaced by what it has been worth:

    r(kind, p) = (hits + PRIOR p) / (seen + PRIOR)      over tokens of this kind and about this p

A token counts when the sample got to its parent. Kinds: drafted by the graph, by the model, by
both; the estimate of a token that both drafted is the larger one. About the last LATEST tokens of a
bin count.
"""

import math

GRAPH, MODEL, BOTH = 0, 1, 2
BINS, PRIOR, LATEST = 24, 8.0, 512


def bin_of(p: float) -> int:
    """Halves of a halving: 0 for p = 1, 2 for p = 1/2."""
    return min(int(-2 * math.log2(max(p, 1e-9))), BINS - 1)


class Reliability:
    """Hits and tokens of each kind and bin."""

    def __init__(self) -> None:
        self.hits = [[0.0] * BINS for _ in range(3)]
        self.seen = [[0.0] * BINS for _ in range(3)]

    def __call__(self, kind: int, p: float) -> float:
        """Probability that the token is sampled at its parent."""
        at = bin_of(p)
        return (self.hits[kind][at] + PRIOR * p) / (self.seen[kind][at] + PRIOR)

    def learn(self, kind: int, p: float, hit: bool) -> None:
        at = bin_of(p)
        self.hits[kind][at] += hit
        self.seen[kind][at] += 1
        if self.seen[kind][at] > LATEST:
            self.hits[kind][at] /= 2
            self.seen[kind][at] /= 2


class Levels:
    """How often one of a node's draws was accepted, by the node's depth."""

    def __init__(self) -> None:
        self.hits: list[float] = []
        self.seen: list[float] = []

    def __call__(self, depth: int) -> float:
        """Expected share, about 0.6 before anything has been seen."""
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
