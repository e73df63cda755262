"""Figures over problems: pass@k, accuracy at 1, and their intervals."""

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np

from csd.utils.arguments import check_whole, each
from csd.utils.check import shown


def pass_at_k(correct: Sequence[bool | None], k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` samples is right.

    With n samples, c of them right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, 2107.03374,
    eq. 1). k = 1 is the accuracy.

    correct: one entry per sample, in the order of their indices; None for a cancelled one. Entries
        after the first None are ignored: samples that finish first differ from the rest. If the
        answers decided how many samples were drawn, pass only the samples that are drawn in any
        case (`csd.Vote.least`).

    Raises ValueError for fewer than `k` samples before the first None.
    """
    k = check_whole("k", k, 1)
    n = c = 0
    for right in each("correct", correct, "a list of True, False or None"):
        if right is None:
            break
        # 0.5 would count as right
        if not isinstance(right, Real | np.bool_) or right not in (0, 1):
            raise ValueError(f"correct must be a list of True, False or None, got {shown(right)}")
        n, c = n + 1, c + bool(right)
    if k > n:
        raise ValueError(f"k must lie between 1 and the {n} samples that count, got {shown(k)}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(values: Sequence[float], samples: int = 1, z: float = 1.959964) -> tuple:
    """Mean over problems and its confidence interval (95% by default): (mean, low, high).

    values: one figure in [0, 1] per problem, each from `samples` samples.

    Problems are random, and the samples of one problem are not independent, so the standard error
    is that of the mean over problems. The interval is Wilson's for the number of independent trials
    with this error, m (1 - m) / se^2, as in surveys (Korn and Graubard 1998): it stays inside
    [0, 1] and does not collapse if all problems agree. The number of trials is limited to between
    the number of problems and the number of samples.

    Raises ValueError without values.
    """
    count = len(values)
    if not count:
        raise ValueError("values must have at least one problem, got none")
    mean = sum(values) / count
    spread = mean * (1 - mean)
    trials = float(count)
    if count > 1:
        error = sum((v - mean) ** 2 for v in values) / (count - 1) / count
        if error:
            trials = min(max(spread / error, count), count * samples)
        elif spread:
            trials = count * samples
    centre = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(spread / trials + z * z / (4 * trials * trials))
    # at a mean of 0 or 1 Wilson's limit is exactly 0 or 1, which rounding would miss
    low = max(0.0, centre - half) if mean > 0 else 0.0
    high = min(1.0, centre + half) if mean < 1 else 1.0
    return mean, low, high
