"""Reference in numpy of the insertion described in `csd/kernels/table/`."""

from typing import Any

import numpy as np
import torch

from csd.kernels.common.sorted_runs import rank_in_run, stable_order, starts
from csd.kernels.table.lookup import MAX_AGE, find_contexts, hash_contexts, order_masks
from csd.kernels.table.rows import OBSERVED
from csd.state.context_table import MAX_TOTAL, Table

_BUSY = 1 << 62
_TOKEN = (1 << 31) - 1


def graph_insert_ref(
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
    """Updates `table` in place; shapes as of `csd.kernels.graph_insert`."""
    arrays = table.arrays()
    observed = group_key, context, succ_token, succ_weight, row_total, source_bit
    *rows, groups = (x.numpy(force=True) for x in (*observed, live_groups))
    _insert(arrays, OBSERVED.kind(*rows), groups, orders)
    if table.step.device.type != "cpu":
        table.copy_(arrays.map(torch.from_numpy))


def _insert(table: Any, rows: Any, live_groups: np.ndarray, orders: tuple[int, ...]) -> None:
    group_key, context = rows.group_key, rows.context
    table.step += 1
    last, inside = order_masks(orders, context.shape[1])
    row, order = ((group_key >= 0)[:, None] & (context[:, last] >= 0)).nonzero()
    if not row.size:
        return
    code = hash_contexts(group_key, context, orders)[row, order]
    tokens = np.where(inside[order], context[row], -1)
    group = group_key[row]
    entry = find_contexts(table, group, tokens, code)

    # runs of equal hashes; the earliest of a run is its leader
    key = code.argsort()
    first = starts(code[key])
    owner = first.cumsum() - 1
    leader = np.minimum.reduceat(key, first.nonzero()[0])
    mine = leader[owner]
    keep = (tokens[key] == tokens[mine]).all(1) & (group[key] == group[mine])

    entries = entry[leader]
    table.entry_stamp[entries[entries >= 0]] = table.step
    new = (entries < 0).nonzero()[0]
    if new.size:
        # owners are in hash order; entries are allocated in update order
        new = new[leader[new].argsort()]
        spot = _take(table, code[leader[new]], live_groups)
        entries[new] = spot
        new, spot = new[spot >= 0], spot[spot >= 0]
        lead = leader[new]
        table.entry_group[spot] = group[lead]
        table.entry_hash[spot] = code[lead]
        table.entry_tokens[spot] = tokens[lead]
        table.entry_total[spot] = 0
        table.entry_stamp[spot] = table.step
        table.succ_token[spot] = -1
        table.succ_weight[spot] = 0
        table.succ_source[spot] = 0
    keep &= entries[owner] >= 0
    row, owner = row[key[keep]], entries[owner[keep]]
    if row.size:
        _merge(table, owner, rows, row)


def _take(table: Any, code: np.ndarray, live_groups: np.ndarray) -> np.ndarray:
    """Allocates entries for new contexts with these hashes, in order; -1 if a bucket has none."""
    ways = table.ways
    bucket = code & (table.buckets - 1)
    by_bucket = stable_order(bucket, table.buckets)
    bucket = bucket[by_bucket]
    rank = rank_in_run(starts(bucket))
    # [new, ways]
    group, total, stamp = (
        x.reshape(-1, ways).take(bucket, 0)
        for x in (table.entry_group, table.entry_total, table.entry_stamp)
    )
    way = np.arange(ways)
    in_flight = np.sort(live_groups)
    alive = in_flight.take(in_flight.searchsorted(group), mode="clip") == group
    alive &= group >= 0
    age = np.minimum(table.step - stamp, MAX_AGE)
    live = (total.astype(np.int64) << 30) | ((MAX_AGE - age) << 4) | way
    live[stamp == table.step] = _BUSY
    # the way is in the low bits
    cost = np.sort(np.where(alive, live, way - ways), 1)
    cost = cost[np.arange(bucket.size), np.minimum(rank, ways - 1)]
    fits = (rank < ways) & (cost < _BUSY)
    table.dropped += np.count_nonzero(~fits)
    spot = np.empty_like(bucket)
    spot[by_bucket] = np.where(fits, bucket * ways + (cost & (ways - 1)), -1)
    return spot


def _merge(table: Any, owner: np.ndarray, rows: Any, row: np.ndarray) -> None:
    """Adds rows `row` [K] to the entries `owner` [K]; those of one entry are adjacent."""
    token, weight = rows.succ_token[row], rows.succ_weight[row]
    row_total, bit = rows.row_total[row], rows.source_bit[row]
    U, E = token.shape[1], table.succ_token.shape[1]
    first = starts(owner)
    begins = first.nonzero()[0]
    owner_entry, mine = owner[begins], first.cumsum() - 1
    P = owner_entry.size
    # int64: the sum may pass 2^31 before it is halved
    total = table.entry_total[owner_entry] + np.add.reduceat(row_total.astype(np.int64), begins)

    # one list of (entry's number, token): the call's updates and the entries' own successors
    new = ((token >= 0) & (weight > 0)).ravel().nonzero()[0]
    row = new // U
    held = table.succ_token.take(owner_entry, 0).ravel()
    old = (held >= 0).nonzero()[0]
    p = old // E
    # flat index of the entries' own successors
    spot = owner_entry[p] * E + old % E
    code = np.concatenate([mine[row], p]) << 31
    code |= np.concatenate([token.ravel()[new], held[old]])
    weight = np.concatenate([weight.ravel()[new], table.succ_weight.ravel()[spot]])
    source = np.concatenate([np.int64(1) << bit[row], table.succ_source.ravel()[spot]])
    order = stable_order(code, P << 31)
    code = code[order]
    begins = starts(code).nonzero()[0]
    code = code[begins]
    weight = np.add.reduceat(weight[order].astype(np.int64), begins)
    source = np.bitwise_or.reduceat(source[order], begins)

    # the list is in (entry, token) order: a stable sort leaves ties to smaller tokens
    p = code >> 31
    order = stable_order((p << 31) | (_TOKEN - weight), P << 31)
    p = p[order]
    rank = rank_in_run(starts(p))
    half = total > MAX_TOTAL
    weight = weight[order] >> half[p]
    keep = ((rank < E) & (weight > 0)).nonzero()[0]
    p, order = p[keep], order[keep]
    table.succ_token[owner_entry] = -1
    table.succ_weight[owner_entry] = table.succ_source[owner_entry] = 0
    spot = owner_entry[p], rank[keep]
    table.succ_token[spot] = code[order] & _TOKEN
    table.succ_weight[spot] = weight[keep]
    table.succ_source[spot] = source[order]
    table.entry_total[owner_entry] = total >> half
