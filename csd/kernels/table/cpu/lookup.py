"""Lookup of contexts in the consensus graph, as `csd.kernels.table.lookup` defines it."""

from functools import lru_cache

import numpy as np

from csd.kernels.numba.jit import loop
from csd.kernels.table.lookup import FINAL_FACTOR, GROUP_FACTOR, TOKEN_FACTORS

TWO, HIGH, LAST = np.int32(2), np.int64(32), np.int64(29)


@lru_cache
def order_sizes(orders: tuple[int, ...]) -> np.ndarray:
    """`orders` as an array [O] int64, which loops read."""
    return np.array(orders, np.int64)


@loop
def hash_prefix(owner, context, orders, code):
    """Writes the hashes of a context [N], latest token first, to code [O]; orders [O] ascend.

    owner: the group's key. Hashes equal those of `hash_contexts`, also where tokens precede the
    text's start.
    """
    z, n = np.int64(owner) * GROUP_FACTOR, 0
    for o in range(orders.shape[0]):
        for i in range(n, orders[o]):
            # the sum is int32, the type of tokens, as in the references
            z += np.int64(np.int32(context[i] + TWO)) * TOKEN_FACTORS[i]
        n = orders[o]
        mixed = (z ^ (z >> HIGH)) * FINAL_FACTOR
        code[o] = mixed ^ (mixed >> LAST)


@loop
def find_entry(
    table,  # arrays of a `Table`
    first,  # first entry of the part that is looked in
    size,  # entries of the part
    ways,
    owner,
    context,  # [N], whose first `order` tokens are the context
    order,
    code,
):
    """Entry of a context with the hash `code`, or -1 if it is absent, as `find_contexts`."""
    base = first + (code & (size // ways - 1)) * ways
    for entry in range(base, base + ways):
        if table.entry_hash[entry] == code:
            # the first entry of this hash decides
            if table.entry_group[entry] != owner:
                return -1
            for i in range(table.entry_tokens.shape[1]):
                if table.entry_tokens[entry, i] != (context[i] if i < order else -1):
                    return -1
            return entry
    return -1
