"""The filters as cuts of a row's tokens, in the order and with the arithmetic of the reference.

The tokens that a cut may keep are listed in ascending order, with their scores z and masses exp z.
A cut moves the tokens that it keeps to the front of the list. Sums over a list are float64 and are
rounded once to the type of the scores, as those of `reference_rows.py`. No list is sorted as a
whole: only the few tokens that share a bucket with the place of a cut are (`boundary`).
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import (
    BLOCK,
    add_to_lane,
    added_lanes,
    at_least,
    block,
    doubles,
    filled,
    minus,
    plus,
    select,
    times,
)
from csd.kernels.numba.math import exp, ordered, places_in_order
from csd.kernels.verify.constants import HEAD_WIDTH

# buckets of equal width, and the range that they share; other values are in the outermost ones
BUCKETS, RANGE = 1024, 24.0
# adjacent tokens often have one bucket, and a sum waits for the one before it
LANES = 2


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
def weigh(score, mass):
    """Write the masses of listed tokens."""
    for w in range(score.shape[0]):
        mass[w] = exp(score[w])


def masses(score: Any, mass: Any, low: Any) -> Any:
    """Masses of the listed tokens with at least the score `low`, and of the others, in float64.

    In float64 they are added in the reference's order, so that a sum has its bits. In float32 they
    are added in lanes, and the rounding of the sum to float32 hides the difference.
    """


@overload(masses)
def _masses(score, mass, low):
    if mass.dtype == types.float64:
        return lambda score, mass, low: _in_order(score, mass, low)
    return lambda score, mass, low: in_lanes(score, mass, low, False)


@loop
def _in_order(score, mass, low):
    head = rest = 0.0
    for w in range(score.shape[0]):
        head += mass[w] if score[w] >= low else 0.0
        rest += 0.0 if score[w] >= low else mass[w]
    return head, rest


@loop
def in_lanes(score, mass, low, surprise):
    """`masses` added in lanes; if `surprise` is true, the sums of -z exp z in place of exp z."""
    zero = type(score[0])(0)
    head = rest = filled(np.float64(0))
    whole = score.shape[0] // BLOCK * BLOCK
    for w in range(0, whole, BLOCK):
        z = block(score, w)
        value, inside = block(mass, w), at_least(z, low)
        value = times(value, minus(z)) if surprise else value
        head = plus(head, doubles(select(value, inside, zero)))
        rest = plus(rest, doubles(select(value, ~inside, zero)))
    for w in range(whole, score.shape[0]):
        value = np.float64(mass[w] * -score[w] if surprise else mass[w])
        inside = score[w] >= low
        head = add_to_lane(head, w - whole, value if inside else 0.0)
        rest = add_to_lane(rest, w - whole, 0.0 if inside else value)
    return added_lanes(head), added_lanes(rest)


@loop
def keep(token, score, mass, value, least, place):
    """Keep the listed tokens whose value is above `least`, or is `least` from `place` on.

    Returns their number. value: an array that may be `score` or `mass`.
    """
    count = 0
    for w in range(token.shape[0]):
        kept = (value[w] > least) | ((value[w] == least) & (w >= place))
        token[count], score[count], mass[count] = token[w], score[w], mass[w]
        count += kept
    return count


@loop
def _bucket(value, origin):
    kind = type(value)
    at = (value - origin) * kind(BUCKETS / RANGE)
    return np.int64(min(max(at, kind(0)), kind(BUCKETS - 1)))


@loop
def boundary(value, mass, low, high, start, total, limit):
    """The place at which masses of listed tokens, in ascending order of value, exceed a limit.

    Returns the value and the place in the list of the first token in this order with
    (start + mass up to and including it) / total > limit, of the last one if there is none. Equal
    values are in order of their places. Only tokens with low <= value < high count.
    """
    kind = type(start)
    origin = max(low, kind(-RANGE))
    sums = np.zeros((LANES, BUCKETS))
    for w in range(value.shape[0]):
        if low <= value[w] < high:
            sums[w % LANES, _bucket(value[w], origin)] += mass[w]
    # mass below the bucket `at`, which is the last one that is not empty if none exceeds
    below = inside = 0.0
    at = 0
    for b in range(BUCKETS):
        more = sums[0, b] + sums[1, b]
        if more > 0:
            below, at, inside = below + inside, b, more
            if (start + kind(below + inside)) / total > limit:
                break
    places, count = np.empty(value.shape[0], np.int64), 0
    for w in range(value.shape[0]):
        places[count] = w
        count += (low <= value[w]) & (value[w] < high) & (_bucket(value[w], origin) == at)
    key = np.empty(count, np.int64)
    for i in range(count):
        # -0.0 equals 0.0
        key[i] = ordered(value[places[i]] + kind(0))
    last = 0
    for i in places_in_order(key):
        last = places[i]
        below += mass[last]
        if (start + kind(below)) / total > limit:
            break
    return value[last], last


@loop
def shifts(score, mass, low, mean, shift):
    """Write how far the listed tokens' surprise is from its mean, infinite without mass.

    Returns the mass of the head's tokens that are nearer than any below the head. low: the head's
    least score.
    """
    kind, near = type(mean), filled(np.float64(0))
    nearest = kind(HEAD_WIDTH) - mean
    for w in range(score.shape[0]):
        distance = abs(score[w] + mean)
        shift[w] = distance if mass[w] > 0 else kind(np.inf)
        inside = (score[w] >= low) & (distance <= nearest)
        near = add_to_lane(near, w % BLOCK, np.float64(mass[w]) if inside else 0.0)
    return added_lanes(near)


@loop
def typical_reach(mass, shift, least):
    """The smallest shift up to which listed tokens have a mass of at least `least`."""
    kind = type(least)
    # a sum that is at least x exceeds the number before x
    limit = np.nextafter(least, kind(0))
    return boundary(shift, mass, kind(0), kind(np.inf), kind(0), kind(1), limit)[0]
