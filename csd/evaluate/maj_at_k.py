"""maj@k: probability that k of a problem's samples would have voted for the right answer."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


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
    found = sum(math.comb(c, j) * _others(others, rest, k - j, j) for j in range(1, min(c, k) + 1))
    return float(found / np.longdouble(math.comb(n, k)))


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
