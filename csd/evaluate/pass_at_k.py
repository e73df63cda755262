"""Figures over problems: pass@k, maj@k, accuracy at 1, and their intervals.

pass@k: probability that at least one of k of a problem's samples is right. maj@k: that k of them
would have voted for the right answer.
"""

import math
from collections import Counter
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


def maj_at_k(answers: Sequence[str | None], right: str, k: int) -> float:
    """Probability that the most frequent answer of k of the samples is `right`.

    All C(n, k) choices are equally likely. If t + 1 answers tie for the lead, each wins with
    probability 1 / (t + 1), since their first samples come in any order. With c samples of the
    right answer and j of them chosen, the other k - j chosen samples have no answer more than j
    times: with [x^a] the coefficient of x^a, and t the number of other answers that also have j,

        sum over j, t of C(c, j) [x^(k-j) y^t] prod over answers a of
            (sum over i < j of C(n_a, i) x^i + y C(n_a, j) x^j) (1 + x)^(n without answer) / (t + 1)

    over C(n, k).

    answers: one per sample, None without an answer. Raises ValueError unless k lies in [1, n].
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and the {n} samples that count, got {k}")
    counts = Counter(answer for answer in answers if answer is not None)
    rest = n - sum(counts.values())
    c, others = counts.pop(right, 0), [*counts.values()]
    total = sum(math.comb(c, j) * _others(others, rest, k - j, j) for j in range(1, min(c, k) + 1))
    return float(total / np.longdouble(math.comb(n, k)))


def _others(counts: list[int], rest: int, chosen: int, j: int) -> np.longdouble:
    """Number of ways to choose `chosen` samples without the right answer, no answer more than j
    times; a way in which t answers have j counts as 1 / (t + 1).

    counts: samples per other answer. rest: samples without an answer.
    """
    # ways[t, a]: ways with t answers chosen j times and a samples chosen
    ways = np.zeros((chosen // j + 1, chosen + 1), np.longdouble)
    for i in range(min(rest, chosen) + 1):
        ways[0, i] = math.comb(rest, i)
    for count in counts:
        more = np.zeros_like(ways)
        for i in range(min(count, j, chosen) + 1):
            part = math.comb(count, i) * ways[:, : chosen + 1 - i]
            if i < j:
                more[:, i:] += part
            else:
                more[1:, i:] += part[:-1]
        ways = more
    return (ways[:, chosen] / np.arange(1, len(ways) + 1)).sum()
