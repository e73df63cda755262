"""The insertion described in `csd/kernels/graph_insert.py`, in numpy."""

from typing import Any

import numpy as np
import torch

from csd.graph.table import MAX_TOTAL, Table
from csd.kernels.graph_lookup import find_contexts, hash_contexts, order_masks

# an entry touched this many inserts ago or earlier counts as equally old
MAX_AGE = (1 << 26) - 1
_BUSY = 1 << 62
_TOKEN = (1 << 31) - 1


def graph_insert_ref(
    table: Table,
    group_key: torch.Tensor,  # [R] int64, -1: skip the row
    context: torch.Tensor,  # [R, N] int32, latest first, -1 before the start
    succ_token: torch.Tensor,  # [R, U] int32, -1 is none
    succ_weight: torch.Tensor,  # [R, U] int32, 0 is none
    row_total: torch.Tensor,  # [R] int32, at least the row's sum of weights
    source_bit: torch.Tensor,  # [R] int32
    live_groups: torch.Tensor,  # [G] int64, -1 is none
    orders: tuple[int, ...],
) -> None:
    """Update `table` in place."""
    arrays = table.arrays()
    _insert(
        arrays,
        group_key.numpy(force=True),
        context.numpy(force=True),
        succ_token.numpy(force=True),
        succ_weight.numpy(force=True),
        row_total.numpy(force=True),
        source_bit.numpy(force=True),
        live_groups.numpy(force=True),
        orders,
    )
    if table.step.device.type != "cpu":
        table.copy_(arrays.map(torch.from_numpy))


def _insert(
    table: Any,
    group_key: np.ndarray,
    context: np.ndarray,
    token: np.ndarray,
    weight: np.ndarray,
    row_total: np.ndarray,
    bit: np.ndarray,
    live_groups: np.ndarray,
    orders: tuple[int, ...],
) -> None:
    table.step += 1
    last, _ = order_masks(orders, context.shape[1])
    row, order = ((group_key >= 0)[:, None] & (context[:, last] >= 0)).nonzero()
    if not row.size:
        return
    code = hash_contexts(group_key, context, orders)
    entry, tokens = find_contexts(table, group_key, context, code, orders)
    code, entry, tokens = (x[row, order] for x in (code, entry, tokens))
    group = group_key[row]

    # runs of equal hashes; stable, so a run starts with its leader
    key = code.argsort(kind="stable")
    first = _starts(code[key])
    owner = first.cumsum() - 1
    leader = key[first]
    mine = leader[owner]
    keep = (tokens[key] == tokens[mine]).all(1) & (group[key] == group[mine])

    place = entry[leader]
    table.entry_stamp[place[place >= 0]] = table.step
    new = (place < 0).nonzero()[0]
    if new.size:
        # owners are in hash order; room is given out in update order
        new = new[leader[new].argsort()]
        spot = _take(table, code[leader[new]], live_groups)
        place[new] = spot
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
    keep &= place[owner] >= 0
    row, owner = row[key[keep]], place[owner[keep]]
    _merge(table, owner, token[row], weight[row], row_total[row], bit[row])


def _starts(x: np.ndarray) -> np.ndarray:
    """Where a run of equal values begins."""
    first = np.ones(x.shape, bool)
    np.not_equal(x[1:], x[:-1], out=first[1:])
    return first


def _rank(first: np.ndarray) -> np.ndarray:
    """Place of each element in its run, given where runs begin."""
    place = np.arange(first.size)
    return place - np.maximum.accumulate(np.where(first, place, 0))


def _take(table: Any, code: np.ndarray, live_groups: np.ndarray) -> np.ndarray:
    """Entries for new contexts with these hashes, in order; -1 where a bucket has none left."""
    ways = table.ways
    bucket = code & (table.buckets - 1)
    by_bucket = bucket.argsort(kind="stable")
    bucket = bucket[by_bucket]
    rank = _rank(_starts(bucket))
    # [new, ways]
    group, total, stamp = (
        x.reshape(-1, ways).take(bucket, 0)
        for x in (table.entry_group, table.entry_total, table.entry_stamp)
    )
    way = np.arange(ways)
    alive = (group >= 0) & np.isin(group, live_groups)
    age = np.minimum(table.step - stamp, MAX_AGE)
    live = (total.astype(np.int64) << 30) | ((MAX_AGE - age) << 4) | way
    live[stamp == table.step] = _BUSY
    cost = np.where(alive, live, way - ways)
    way = cost.argsort(1)[np.arange(bucket.size), np.minimum(rank, ways - 1)]
    room = (rank < ways) & (cost[np.arange(bucket.size), way] < _BUSY)
    table.dropped += np.count_nonzero(~room)
    spot = np.empty_like(bucket)
    spot[by_bucket] = np.where(room, bucket * ways + way, -1)
    return spot


def _merge(
    table: Any,
    owner: np.ndarray,
    token: np.ndarray,
    weight: np.ndarray,
    row_total: np.ndarray,
    bit: np.ndarray,
) -> None:
    """Add updates [K, U] to the successors of entries `owner` [K], and totals to theirs."""
    E = table.succ_token.shape[1]
    order = owner.argsort(kind="stable")
    at = _starts(owner[order]).nonzero()[0]
    place = owner[order[at]]
    # int64: the sum may pass 2^31 before it is halved
    total = table.entry_total[place] + np.add.reduceat(row_total[order].astype(np.int64), at)

    # one list of (entry, token): the call's updates and what the entries hold
    row, u = ((token >= 0) & (weight > 0)).nonzero()
    mine, e = (table.succ_token[place] >= 0).nonzero()
    held = place[mine]
    code = np.concatenate([owner[row], held]) << 31
    code |= np.concatenate([token[row, u], table.succ_token[held, e]])
    weight = np.concatenate([weight[row, u], table.succ_weight[held, e]])
    source = np.concatenate([np.int64(1) << bit[row], table.succ_source[held, e]])
    order = code.argsort(kind="stable")
    code = code[order]
    at = _starts(code).nonzero()[0]
    code = code[at]
    weight = np.add.reduceat(weight[order].astype(np.int64), at)
    source = np.bitwise_or.reduceat(source[order], at)

    # the list is in (entry, token) order: a stable sort leaves ties to smaller tokens
    owner = code >> 31
    order = ((owner << 31) | (_TOKEN - weight)).argsort(kind="stable")
    owner = owner[order]
    rank = _rank(_starts(owner))
    order, owner, rank = order[rank < E], owner[rank < E], rank[rank < E]
    table.succ_token[place], table.succ_weight[place], table.succ_source[place] = -1, 0, 0
    half = total > MAX_TOTAL
    weight = weight[order] >> half[place.searchsorted(owner)]
    some = weight > 0
    owner, rank, order = owner[some], rank[some], order[some]
    table.succ_token[owner, rank] = code[order] & _TOKEN
    table.succ_weight[owner, rank] = weight[some]
    table.succ_source[owner, rank] = source[order]
    table.entry_total[place] = total >> half
