"""The filters as cuts of a row's head, in the order and with the arithmetic of the reference.

A cut sets the scores of the tokens that it drops to -inf. Sums over a head are float64 and are
rounded once to the type of the scores, as those of `reference_rows.py`. A cut that falls below the
head is left to the reference, for its row alone.
"""

import numpy as np

from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import ordered, places_in_order
from csd.kernels.verify.constants import HEAD_WIDTH


@loop
def kth_largest(x, k, heap):
    """The k-th largest of x [n >= k]; heap: [k] at least, workspace."""
    for i in range(x.shape[0]):
        value, j = x[i], 0
        if i < k:
            j = i
            while j > 0 and heap[(j - 1) // 2] > value:
                heap[j] = heap[(j - 1) // 2]
                j = (j - 1) // 2
            heap[j] = value
        elif value > heap[0]:
            child = 1
            while child < k:
                if child + 1 < k and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= value:
                    break
                heap[j] = heap[child]
                j, child = child, 2 * child + 1
            heap[j] = value
    return heap[0]


@loop
def keep(token, score, low):
    """Move the tokens of at least score `low` to the front, in order; returns their number."""
    count = 0
    for w in range(token.shape[0]):
        if score[w] >= low and score[w] > -np.inf:
            token[count], score[count] = token[w], score[w]
            count += 1
    return count


@loop
def in_order(x):
    """Stable ascending argsort of numbers."""
    key = np.empty(x.shape[0], np.int64)
    for w in range(x.shape[0]):
        # -0.0 equals 0.0
        key[w] = ordered(x[w] + type(x[0])(0))
    return places_in_order(key)


@loop
def top_p_cut(score, rest, top_p):
    """Drop the tokens in the lower tail of mass 1 - top_p; True if the cut is below the head.

    rest: mass of the tokens below the head, all of which are dropped unless the cut is there.
    """
    kind = type(rest)
    mass, total = np.empty_like(score), 0.0
    for w in range(score.shape[0]):
        mass[w] = np.exp(score[w])
        total += mass[w]
    total, tail = kind(total) + rest, kind(1) - top_p
    if rest / total > tail:
        return True
    below = 0.0
    # the most likely token stays
    for w in in_order(score)[:-1]:
        below += mass[w]
        if (rest + kind(below)) / total > tail:
            break
        score[w] = -np.inf
    return False


@loop
def min_p_cut(score, rest, min_p):
    """Drop tokens less than min_p times as likely as the likeliest; True if the cut is below."""
    if rest > 0 and min_p <= np.exp(type(rest)(-HEAD_WIDTH)):
        return True
    for w in range(score.shape[0]):
        if np.exp(score[w]) < min_p:
            score[w] = -np.inf
    return False


@loop
def typical_cut(score, rest, moment, least):
    """Drop the tokens whose surprise is far from its mean; True if the cut is below the head.

    rest, moment: sums of exp(z) and of -z exp(z) of the tokens below the head. least: mass to keep.
    """
    kind = type(rest)
    mass, total, mean = np.empty_like(score), 0.0, 0.0
    for w in range(score.shape[0]):
        mass[w] = np.exp(score[w])
        total += mass[w]
        mean += mass[w] * -score[w] if mass[w] > 0 else kind(0)
    total = kind(total) + rest
    mean, target = (kind(mean) + moment) / total, least * total
    shift, near = np.empty_like(score), 0.0
    for w in range(score.shape[0]):
        shift[w] = abs(score[w] + mean) if mass[w] > 0 else kind(np.inf)
        near += mass[w] if shift[w] <= kind(HEAD_WIDTH) - mean else kind(0)
    if rest > 0 and kind(near) < target:
        return True
    reach, inside = kind(np.inf), 0.0
    for w in in_order(shift):
        reach = shift[w]
        inside += mass[w]
        if kind(inside) >= target:
            break
    for w in range(score.shape[0]):
        if shift[w] > reach:
            score[w] = -np.inf
    return False
