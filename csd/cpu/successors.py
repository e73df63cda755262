"""Merge of a context's old and new successors, as in `csd.kernels.graph_insert`."""

import numpy as np

from csd.cpu.compiled import loop
from csd.state.context_table import MAX_TOTAL

TOKEN_BITS = np.int64(31)
MOST_TOKEN = np.int64((1 << 31) - 1)


@loop
def merge(
    entry,
    last,  # the last key of the context
    count,  # number of its keys
    before,  # [K], the key before each, or -1
    orders,  # number of orders, i.e. of keys per row
    token,  # [R, U]
    weight,  # [R, U]
    row_total,  # [R]
    bit,  # [R]
    entry_total,  # [C]
    succ_token,  # [C, E]
    succ_weight,  # [C, E]
    succ_source,  # [C, E]
    found,  # workspace for tokens: E and those of all keys at least
    mass,  # workspace for their weights
    source,  # workspace for their sources
    index,  # hash table of `found`, at least twice as long, rounded up to a power of two
    best,  # [E], workspace
    who,  # [E], workspace
):
    """Adds the rows of a context's keys to its entry, in place."""
    U, E = token.shape[1], succ_token.shape[1]
    size = 1
    while size < 2 * (E + count * U):
        size *= 2
    index[:size] = -1
    n = 0
    for e in range(E):
        if succ_token[entry, e] < 0:
            break
        n = _add(
            succ_token[entry, e], succ_weight[entry, e], succ_source[entry, e],
            found, mass, source, index, size, n,
        )  # fmt: skip
    total, key = np.int64(entry_total[entry]), last
    while key >= 0:
        row = key // orders
        total += row_total[row]
        mine = np.int64(1) << np.int64(bit[row])
        for u in range(U):
            if token[row, u] >= 0 and weight[row, u] > 0:
                n = _add(token[row, u], weight[row, u], mine, found, mass, source, index, size, n)
        key = before[key]

    kept = 0
    for i in range(n):
        # larger for heavier tokens, and of equal weights for smaller ones
        rank = mass[i] << TOKEN_BITS | (MOST_TOKEN - found[i])
        if kept == E and rank < best[E - 1]:
            continue
        j = min(kept, E - 1)
        kept = min(kept + 1, E)
        while j > 0 and best[j - 1] < rank:
            best[j], who[j] = best[j - 1], who[j - 1]
            j -= 1
        best[j], who[j] = rank, i
    half = np.int64(total > MAX_TOTAL)
    entry_total[entry] = total >> half
    for e in range(E):
        i = who[e] if e < kept else 0
        w = mass[i] >> half if e < kept else 0
        succ_token[entry, e] = found[i] if w > 0 else -1
        succ_weight[entry, e] = w
        succ_source[entry, e] = source[i] if w > 0 else 0


@loop
def _add(token, weight, source_bits, found, mass, source, index, size, n):
    """Add weight and sources to a token, inserting it if new; returns the number of tokens."""
    h = (np.int64(token) * 0x9E3779B1 >> 16) & (size - 1)
    while index[h] >= 0 and found[index[h]] != token:
        h = (h + 1) & (size - 1)
    i = index[h]
    if i < 0:
        index[h] = n
        found[n], mass[n], source[n] = token, weight, source_bits
        return n + 1
    mass[i] += weight
    source[i] |= source_bits
    return n
