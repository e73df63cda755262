"""The contexts that rows update and their entries; equal keys are grouped by hash."""

import numpy as np

from csd.cpu.compiled import loop
from csd.cpu.graph_lookup import find_entry, hash_prefix
from csd.cpu.lanes import fetch

# int64 numbers in a cache line; number of contexts by which prefetching is ahead of reading
LONGS, AHEAD = 8, 8


@loop
def gather(
    group_key,  # [R]
    context,  # [R, N]
    orders,  # [O]
    ways,
    entry_group,  # [C]
    entry_hash,  # [C]
    entry_total,  # [C]
    entry_stamp,  # [C]
    code,  # [K], written, and so are all below: hash of a context
    before,  # [K], the key of the same context before each, or -1
    first,  # [K], a context's first key
    last,  # [K], its last key
    count,  # [K], number of its keys
):
    """Group keys by context, in the order of first keys; returns the number of contexts.

    Key r O + o is row r's context of order orders[o]. Prefetches the buckets of the contexts.
    """
    O, contexts, size = orders.shape[0], 0, 1
    while size < 2 * code.shape[0]:
        size *= 2
    # hash table of contexts
    table, hashes = np.full(size, -1, np.int32), np.empty(O, np.int64)
    for r in range(group_key.shape[0]):
        if group_key[r] < 0:
            continue
        hash_prefix(group_key[r], context[r], orders, hashes)
        for o in range(O):
            if context[r, orders[o] - 1] < 0:
                continue
            key, h = r * O + o, hashes[o] & (size - 1)
            while table[h] >= 0 and code[table[h]] != hashes[o]:
                h = (h + 1) & (size - 1)
            c = table[h]
            if c < 0:
                table[h], c = contexts, contexts
                contexts += 1
                code[c], first[c], last[c], count[c], before[key] = hashes[o], key, key, 1, -1
                base = (hashes[o] & (entry_hash.shape[0] // ways - 1)) * ways
                fetch(entry_total, base)
                fetch(entry_stamp, base)
                for entry in range(base, base + ways, LONGS):
                    fetch(entry_hash, entry)
                    fetch(entry_group, entry)
            elif _same(group_key, context, orders, key, first[c]):
                before[key], last[c] = last[c], key
                count[c] += 1
    return contexts


@loop
def find(
    contexts,
    code,  # [K]
    first,  # [K]
    group_key,  # [R]
    context,  # [R, N]
    orders,  # [O]
    ways,
    entry_group,  # [C]
    entry_hash,  # [C]
    entry_tokens,  # [C, N]
    place,  # [K], written: the entry of each context, or -1
):
    """Look up the entries of the first `contexts` contexts, which `gather` has written."""
    O, N = orders.shape[0], entry_tokens.shape[1]
    for c in range(contexts):
        if c + AHEAD < contexts:
            base = (code[c + AHEAD] & (entry_hash.shape[0] // ways - 1)) * ways
            for entry in range(base, base + ways):
                if entry_hash[entry] == code[c + AHEAD]:
                    fetch(entry_tokens, entry * N)
        r, o = first[c] // O, first[c] % O
        place[c] = find_entry(
            entry_group, entry_hash, entry_tokens, ways, group_key[r], context[r], orders[o],
            code[c],
        )  # fmt: skip


@loop
def _same(group_key, context, orders, key, other):
    """True if two keys have the same group, order and tokens."""
    O = orders.shape[0]
    r, q, order = key // O, other // O, orders[key % O]
    same = group_key[r] == group_key[q] and order == orders[other % O]
    for i in range(order):
        same &= context[r, i] == context[q, i]
    return same
