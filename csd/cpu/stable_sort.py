"""Stable sort for loops; numba's own sort takes seconds to compile for each type of array."""

import numpy as np

from csd.cpu.compiled import loop

# length of runs that are sorted by insertion before they are merged
RUN = 8


@loop
def places_in_order(key):
    """Stable ascending argsort of key [n] int64; returns indices [n] int64."""
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
