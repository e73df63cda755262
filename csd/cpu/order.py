"""Stable sorting in loops: numba's own takes seconds to compile for each kind of array."""

import numpy as np

from csd.cpu.compiled import loop

# places that are sorted one by one before they are merged
RUN = 8


@loop
def places_in_order(key):
    """[n] places of key [n] int64, smallest first, equal ones as they come."""
    n = key.shape[0]
    order, merged = np.empty(n, np.int64), np.empty(n, np.int64)
    for first in range(0, n, RUN):
        for i in range(first, min(first + RUN, n)):
            j = i
            while j > first and key[order[j - 1]] > key[i]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = i
    width = RUN
    while width < n:
        for first in range(0, n, 2 * width):
            middle, end = min(first + width, n), min(first + 2 * width, n)
            i, j = first, middle
            for k in range(first, end):
                if i < middle and (j >= end or key[order[i]] <= key[order[j]]):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order
