"""Insertion into the consensus graph in one call; see `csd/kernels/table`.

`insert_rows` groups the keys that rows update by context (`gather`), looks up their entries
(`find`), allocates those of new contexts, and merges old and new successors (`merge`).
"""

from typing import Any

import numpy as np

from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import fetch
from csd.kernels.numba.tensors import require
from csd.kernels.table.cpu.lookup import find_entry, hash_prefix, order_sizes
from csd.kernels.table.lookup import MAX_AGE
from csd.kernels.table.reference import graph_insert_ref
from csd.kernels.table.rows import OBSERVED, TABLE
from csd.state.context_table import MAX_TOTAL, Table
from csd.state.record import on_host

# int64 numbers in a cache line; number of contexts by which prefetching is ahead of reading
LONGS, AHEAD = 8, 8
TOKEN_BITS = np.int64(31)
MAX_TOKEN = np.int64((1 << 31) - 1)
NONE = np.iinfo(np.int64).max


@loop
def gather(
    rows,  # arrays of `Observed`
    orders,  # [O]
    ways,
    held,  # arrays of the `Table`
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
    group_key, context = rows.group_key, rows.context
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
                base = (hashes[o] & (held.entry_hash.shape[0] // ways - 1)) * ways
                fetch(held.entry_total, base)
                fetch(held.entry_stamp, base)
                for entry in range(base, base + ways, LONGS):
                    fetch(held.entry_hash, entry)
                    fetch(held.entry_group, entry)
            elif _same(rows, orders, key, first[c]):
                before[key], last[c] = last[c], key
                count[c] += 1
    return contexts


@loop
def find(
    contexts,
    code,  # [K]
    first,  # [K]
    rows,  # arrays of `Observed`
    orders,  # [O]
    ways,
    held,  # arrays of the `Table`
    entry_of,  # [K], written: the entry of each context, or -1
):
    """Look up the entries of the first `contexts` contexts, which `gather` has written."""
    O, N, size = orders.shape[0], held.entry_tokens.shape[1], held.entry_hash.shape[0]
    for c in range(contexts):
        if c + AHEAD < contexts:
            base = (code[c + AHEAD] & (size // ways - 1)) * ways
            for entry in range(base, base + ways):
                if held.entry_hash[entry] == code[c + AHEAD]:
                    fetch(held.entry_tokens, entry * N)
        r, o = first[c] // O, first[c] % O
        group = rows.group_key[r]
        entry_of[c] = find_entry(held, 0, size, ways, group, rows.context[r], orders[o], code[c])


@loop
def _same(rows, orders, key, other):
    """True if two keys have the same group, order and tokens."""
    O = orders.shape[0]
    r, q, order = key // O, other // O, orders[key % O]
    same = rows.group_key[r] == rows.group_key[q] and order == orders[other % O]
    for i in range(order):
        same &= rows.context[r, i] == rows.context[q, i]
    return same


@loop
def merge(
    entry,
    last,  # the last key of the context
    count,  # number of its keys
    before,  # [K], the key before each, or -1
    orders,  # number of orders, i.e. of keys per row
    rows,  # arrays of `Observed`
    held,  # arrays of the `Table`
    found,  # workspace for tokens (E and those of all keys at least), their weights and sources,
    # and a hash table of at least twice as many tokens, rounded up to a power of two
    best,  # [E], workspace
    who,  # [E], workspace
):
    """Adds the rows of a context's keys to its entry, in place."""
    token, weight = rows.succ_token, rows.succ_weight
    succ_token, succ_weight, succ_source = held.succ_token, held.succ_weight, held.succ_source
    U, E = token.shape[1], succ_token.shape[1]
    size = 1
    while size < 2 * (E + count * U):
        size *= 2
    tokens, mass, source, index = found
    index[:size] = -1
    n = 0
    for e in range(E):
        if succ_token[entry, e] < 0:
            break
        n = _add(succ_token[entry, e], succ_weight[entry, e], succ_source[entry, e], found, size, n)
    total, key = np.int64(held.entry_total[entry]), last
    while key >= 0:
        row = key // orders
        total += rows.row_total[row]
        mine = np.int64(1) << np.int64(rows.source_bit[row])
        for u in range(U):
            if token[row, u] >= 0 and weight[row, u] > 0:
                n = _add(token[row, u], weight[row, u], mine, found, size, n)
        key = before[key]

    count_kept = 0
    for i in range(n):
        # larger for heavier tokens, and of equal weights for smaller ones
        rank = mass[i] << TOKEN_BITS | (MAX_TOKEN - tokens[i])
        if count_kept == E and rank < best[E - 1]:
            continue
        j = min(count_kept, E - 1)
        count_kept = min(count_kept + 1, E)
        while j > 0 and best[j - 1] < rank:
            best[j], who[j] = best[j - 1], who[j - 1]
            j -= 1
        best[j], who[j] = rank, i
    half = np.int64(total > MAX_TOTAL)
    held.entry_total[entry] = total >> half
    for e in range(E):
        i = who[e] if e < count_kept else 0
        w = mass[i] >> half if e < count_kept else 0
        succ_token[entry, e] = tokens[i] if w > 0 else -1
        succ_weight[entry, e] = w
        succ_source[entry, e] = source[i] if w > 0 else 0


@loop
def _add(token, weight, source_bits, found, size, n):
    """Add weight and sources to a token, inserting it if new; returns the number of tokens."""
    tokens, mass, source, index = found
    h = (np.int64(token) * 0x9E3779B1 >> 16) & (size - 1)
    while index[h] >= 0 and tokens[index[h]] != token:
        h = (h + 1) & (size - 1)
    i = index[h]
    if i < 0:
        index[h] = n
        tokens[n], mass[n], source[n] = token, weight, source_bits
        return n + 1
    mass[i] += weight
    source[i] |= source_bits
    return n


@loop
def insert_rows(
    rows,  # arrays of `Observed`
    live_groups,  # [G]
    orders,  # [O]
    ways,
    held,  # arrays of the `Table`, written
):
    """Insert rows into the table; returns False, with no change, if a row's group is not live."""
    R, O = rows.group_key.shape[0], orders.shape[0]
    for r in range(R):
        if rows.group_key[r] >= 0 and not _among(rows.group_key[r], live_groups):
            return False
    held.step[0] += 1

    # a context's hash, first and last key, number of keys and entry; `before` is per key
    K, kind = R * O, np.int64
    code, before, entry_of = np.empty(K, kind), np.empty(K, kind), np.empty(K, kind)
    first, last, count = np.empty(K, kind), np.empty(K, kind), np.empty(K, kind)
    contexts = gather(rows, orders, ways, held, code, before, first, last, count)
    find(contexts, code, first, rows, orders, ways, held, entry_of)
    largest, new = 0, np.zeros(contexts, np.bool_)
    for c in range(contexts):
        largest = max(largest, count[c])
        if entry_of[c] >= 0:
            held.entry_stamp[entry_of[c]] = held.step[0]
    for c in range(contexts):
        if entry_of[c] >= 0:
            continue
        entry = _free_entry(code[c], live_groups, ways, held)
        entry_of[c] = entry
        if entry < 0:
            held.dropped[0] += 1
            continue
        new[c] = True
        held.entry_group[entry], held.entry_hash[entry] = rows.group_key[first[c] // O], code[c]
        held.entry_total[entry], held.entry_stamp[entry] = 0, held.step[0]

    E, N = held.succ_token.shape[1], held.entry_tokens.shape[1]
    tokens = E + largest * rows.succ_token.shape[1]
    merged, mass, source = np.empty(tokens, kind), np.empty(tokens, kind), np.empty(tokens, kind)
    found = merged, mass, source, np.empty(4 * tokens, np.int32)
    best, who = np.empty(E, kind), np.empty(E, kind)
    for c in range(contexts):
        if c + AHEAD < contexts and entry_of[c + AHEAD] >= 0:
            soon = entry_of[c + AHEAD]
            if new[c + AHEAD]:
                fetch(held.entry_tokens, soon * N)
            for e in range(soon * E, soon * E + E, LONGS):
                fetch(held.succ_source, e)
            for e in range(soon * E, soon * E + E, 2 * LONGS):
                fetch(held.succ_token, e)
                fetch(held.succ_weight, e)
        entry = entry_of[c]
        if entry < 0:
            continue
        if new[c]:
            r, order = first[c] // O, orders[first[c] % O]
            for i in range(N):
                held.entry_tokens[entry, i] = rows.context[r, i] if i < order else -1
            held.succ_token[entry] = -1
        merge(entry, last[c], count[c], before, O, rows, held, found, best, who)
    return True


@loop
def _among(group, live_groups):
    """True if `group` is in `live_groups`."""
    present = False
    for g in range(live_groups.shape[0]):
        present |= live_groups[g] == group
    return present


@loop
def _free_entry(code, live_groups, ways, held):
    """Entry of a hash's bucket to replace next, or -1 if this call has touched all of them."""
    base = (code & (held.entry_group.shape[0] // ways - 1)) * ways
    least, spot = NONE, -1
    for entry in range(base, base + ways):
        group = held.entry_group[entry]
        if group < 0 or not _among(group, live_groups):
            return entry
        if held.entry_stamp[entry] == held.step[0]:
            continue
        age = min(np.int64(held.step[0]) - held.entry_stamp[entry], MAX_AGE)
        cost = np.int64(held.entry_total[entry]) << 30 | (MAX_AGE - age) << 4
        # the first of entries of equal cost is replaced
        if cost < least:
            least, spot = cost, entry
    return spot


def graph_insert(table: Table, *rows_and_orders: Any) -> None:
    """Inserts rows into `table` in place, as `graph_insert_ref`.

    The reference itself runs if a row's group is not in flight.
    """
    *rows, orders = rows_and_orders
    require(on_host(table.step, *rows), "graph_insert", table.step, *rows)
    *arrays, groups = (x.contiguous().numpy() for x in rows)
    held, sizes = TABLE.arrays(table), order_sizes(orders)
    if not insert_rows(OBSERVED.kind(*arrays), groups, sizes, table.ways, held):
        graph_insert_ref(table, *rows_and_orders)
