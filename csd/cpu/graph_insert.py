"""Insertion into the consensus graph in one call; see `csd/kernels/graph_insert`."""

from collections import namedtuple

import numpy as np
import torch

from csd.cpu.compiled import loop
from csd.cpu.context_hashes import AHEAD, LONGS, find, gather
from csd.cpu.graph_lookup import order_sizes
from csd.cpu.lanes import fetch
from csd.cpu.successors import merge
from csd.cpu.tensor_access import on_host, require
from csd.kernels.graph_insert.constants import MAX_AGE
from csd.kernels.graph_insert.reference import graph_insert_ref
from csd.state.context_table import Table

NONE = np.iinfo(np.int64).max


@loop
def insert_rows(
    group_key,  # [R]
    context,  # [R, N]
    token,  # [R, U]
    weight,  # [R, U]
    row_total,  # [R]
    bit,  # [R]
    live_groups,  # [G]
    orders,  # [O]
    ways,
    entry_group,  # [C]
    entry_hash,  # [C]
    entry_tokens,  # [C, N]
    entry_total,  # [C]
    entry_stamp,  # [C]
    succ_token,  # [C, E]
    succ_weight,  # [C, E]
    succ_source,  # [C, E]
    step,  # [1]
    dropped,  # [1]
):
    """Insert rows into the table; returns False, with no change, if a row's group is not live."""
    R, O = group_key.shape[0], orders.shape[0]
    for r in range(R):
        if group_key[r] >= 0 and not _among(group_key[r], live_groups):
            return False
    step[0] += 1

    # of each context: its hash, first and last key, number of keys and entry; `before` is per key
    K, kind = R * O, np.int64
    code, before, place = np.empty(K, kind), np.empty(K, kind), np.empty(K, kind)
    first, last, count = np.empty(K, kind), np.empty(K, kind), np.empty(K, kind)
    contexts = gather(
        group_key, context, orders, ways, entry_group, entry_hash, entry_total, entry_stamp,
        code, before, first, last, count,
    )  # fmt: skip
    find(
        contexts, code, first, group_key, context, orders, ways, entry_group, entry_hash,
        entry_tokens, place,
    )  # fmt: skip
    most, new = 0, np.zeros(contexts, np.bool_)
    for c in range(contexts):
        most = max(most, count[c])
        if place[c] >= 0:
            entry_stamp[place[c]] = step[0]
    for c in range(contexts):
        if place[c] >= 0:
            continue
        entry = _free_entry(
            code[c], live_groups, ways, entry_group, entry_total, entry_stamp, step[0]
        )
        place[c] = entry
        if entry < 0:
            dropped[0] += 1
            continue
        new[c] = True
        entry_group[entry], entry_hash[entry] = group_key[first[c] // O], code[c]
        entry_total[entry], entry_stamp[entry] = 0, step[0]

    E, N = succ_token.shape[1], entry_tokens.shape[1]
    tokens = E + most * token.shape[1]
    found, mass, source = np.empty(tokens, kind), np.empty(tokens, kind), np.empty(tokens, kind)
    best, who, index = np.empty(E, kind), np.empty(E, kind), np.empty(4 * tokens, np.int32)
    for c in range(contexts):
        if c + AHEAD < contexts and place[c + AHEAD] >= 0:
            soon = place[c + AHEAD]
            if new[c + AHEAD]:
                fetch(entry_tokens, soon * N)
            for e in range(soon * E, soon * E + E, LONGS):
                fetch(succ_source, e)
            for e in range(soon * E, soon * E + E, 2 * LONGS):
                fetch(succ_token, e)
                fetch(succ_weight, e)
        entry = place[c]
        if entry < 0:
            continue
        if new[c]:
            r, order = first[c] // O, orders[first[c] % O]
            for i in range(N):
                entry_tokens[entry, i] = context[r, i] if i < order else -1
            succ_token[entry] = -1
        merge(
            entry, last[c], count[c], before, O, token, weight, row_total, bit, entry_total,
            succ_token, succ_weight, succ_source, found, mass, source, index, best, who,
        )  # fmt: skip
    return True


@loop
def _among(group, live_groups):
    """True if `group` is in `live_groups`."""
    found = False
    for g in range(live_groups.shape[0]):
        found |= live_groups[g] == group
    return found


@loop
def _free_entry(code, live_groups, ways, entry_group, entry_total, entry_stamp, step):
    """Entry of a hash's bucket to replace next, or -1 if this call has touched all of them."""
    base = (code & (entry_group.shape[0] // ways - 1)) * ways
    least, spot = NONE, -1
    for entry in range(base, base + ways):
        group = entry_group[entry]
        if group < 0 or not _among(group, live_groups):
            return entry
        if entry_stamp[entry] == step:
            continue
        age = min(np.int64(step) - entry_stamp[entry], MAX_AGE)
        cost = np.int64(entry_total[entry]) << 30 | (MAX_AGE - age) << 4
        # of entries of equal cost, the first is replaced
        if cost < least:
            least, spot = cost, entry
    return spot


# the fields of a table, in the order of the loop's arguments
TableTensors = namedtuple(
    "TableTensors",
    "entry_group entry_hash entry_tokens entry_total entry_stamp succ_token succ_weight "
    "succ_source step dropped",
)


def table_tensors(table: Table) -> TableTensors:
    """The tensors of a table that the loop reads and writes."""
    return TableTensors(*[getattr(table, name) for name in TableTensors._fields])


def graph_insert(
    table: Table,
    group_key: torch.Tensor,
    context: torch.Tensor,
    succ_token: torch.Tensor,
    succ_weight: torch.Tensor,
    row_total: torch.Tensor,
    source_bit: torch.Tensor,
    live_groups: torch.Tensor,
    orders: tuple[int, ...],
) -> None:
    """Inserts rows into `table` in place, as `graph_insert_ref`.

    The reference itself runs if a row's group is not in flight.
    """
    rows = (group_key, context, succ_token, succ_weight, row_total, source_bit, live_groups)
    require(on_host(table.step, *rows), "graph_insert", table.step, *rows)
    given = (x.contiguous().numpy() for x in rows)
    held = (x.numpy() for x in table_tensors(table))
    if not insert_rows(*given, order_sizes(orders), table.ways, *held):
        graph_insert_ref(table, *rows, orders)
