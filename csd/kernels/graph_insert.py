"""Insert what a step or a prompt has shown into the consensus graph.

Row r observed the successors `succ_token[r]` with weights `succ_weight[r]` after its context. It
updates its contexts of all `orders` (those it has enough tokens for), so a call makes R * O keys.
With the table as it was before the call:

1. Keys of equal hash are one context; its leader is the first of them in (row, order) order. A key
   whose group or tokens differ from its leader's (a collision of the hash) is dropped.
2. A leader whose context is in the table touches its entry.
3. The other leaders of one bucket, in order, take its replaceable entries: first the empty and
   dead ones by place, then the live ones that this call has not touched, the lightest total first,
   then the one touched longest ago, then by place. A leader that finds none left is dropped.
4. A touched context's successors become

       w(t) = old w(t) + sum of the call's weights on t,    the E heaviest, ties to smaller tokens

   with the sources of both, its total grows by its rows' totals, and when the total passes
   MAX_TOTAL total and weights are halved, rounding down, and successors of weight 0 leave.

Nothing depends on the order of execution. The call's weights on one context, and its totals, must
stay below 2^30 together.
"""

import torch

from csd.graph.table import MAX_TOTAL, Table
from csd.kernels.graph_lookup import graph_lookup_ref

# an entry touched this many inserts ago or earlier counts as equally old
MAX_AGE = (1 << 26) - 1
_BUSY = 1 << 62


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
    table.step += 1
    code, tokens, entry = graph_lookup_ref(table, group_key, context, orders)
    key = (entry.flatten() > -2).nonzero()[:, 0]
    if not key.numel():
        return
    row = key // len(orders)
    group, tokens = group_key[row], tokens.flatten(0, 1)[key]

    # runs of equal hashes; stable, so a run starts with its leader
    code, order = code.flatten()[key].sort(stable=True)
    first = _starts(code)
    owner = first.cumsum(0) - 1
    leader = order[first]
    mine = leader[owner]
    same = (tokens[order] == tokens[mine]).all(1) & (group[order] == group[mine])

    place = entry.flatten()[key[leader]]
    table.entry_stamp[place[place >= 0]] = table.step
    new = (place < 0).nonzero()[:, 0]
    if new.numel():
        # owners are in hash order; room is given out in update order
        new = new[leader[new].argsort()]
        place[new] = _take(table, code[first][new], live_groups)
        new = new[place[new] >= 0]
        spot, lead = place[new], leader[new]
        table.entry_group[spot] = group[lead]
        table.entry_hash[spot] = code[first][new]
        table.entry_tokens[spot] = tokens[lead]
        table.entry_total[spot] = 0
        table.entry_stamp[spot] = table.step
        table.succ_token[spot] = -1
        table.succ_weight[spot] = 0
        table.succ_source[spot] = 0
    keep = same & (place[owner] >= 0)
    row, owner = row[order][keep], owner[keep]
    _merge(table, place, owner, succ_token[row], succ_weight[row], row_total[row], source_bit[row])


def _starts(x: torch.Tensor) -> torch.Tensor:
    """Where a run of equal values begins."""
    first = torch.ones_like(x, dtype=torch.bool)
    torch.ne(x[1:], x[:-1], out=first[1:])
    return first


def _rank(first: torch.Tensor) -> torch.Tensor:
    """Place of each element in its run, given where runs begin."""
    place = torch.arange(first.shape[0], device=first.device)
    return place - torch.where(first, place, 0).cummax(0).values


def _take(table: Table, code: torch.Tensor, live_groups: torch.Tensor) -> torch.Tensor:
    """Entries for new contexts with these hashes, in order; -1 where a bucket has none left."""
    ways = table.ways
    bucket = code & (table.buckets - 1)
    by_bucket = bucket.argsort(stable=True)
    bucket = bucket[by_bucket]
    rank = _rank(_starts(bucket))
    # [new, ways]
    group = table.entry_group.view(-1, ways)[bucket]
    total = table.entry_total.view(-1, ways)[bucket].long()
    stamp = table.entry_stamp.view(-1, ways)[bucket]
    way = torch.arange(ways, device=code.device)
    alive = (group[:, :, None] == live_groups).any(2) & (group >= 0)
    age = (table.step - stamp).clamp(max=MAX_AGE)
    live = (total << 30) | ((MAX_AGE - age) << 4) | way
    live = torch.where(stamp == table.step, _BUSY, live)
    cost, way = torch.where(alive, live, way - ways).sort(1)
    at = rank.clamp(max=ways - 1)[:, None]
    room = (rank < ways) & (cost.gather(1, at)[:, 0] < _BUSY)
    table.dropped += (~room).sum()
    spot = torch.empty_like(bucket)
    spot[by_bucket] = torch.where(room, bucket * ways + way.gather(1, at)[:, 0], -1)
    return spot


def _merge(table, place, owner, token, weight, row_total, bit) -> None:
    """Add updates [K, U] of owners [K] (indices into place) to the entries at `place`."""
    E = table.succ_token.shape[1]
    n, device = place.shape[0], place.device
    safe = place.clamp(min=0)
    mine = torch.arange(n, device=device)

    # one list of (owner, token, bit): the table's own successors carry 63 for a bit
    old = (table.succ_token[safe] >= 0) & (place >= 0)[:, None]
    slot = (safe[:, None] * E + torch.arange(E, device=device))[old]
    old_code = table.succ_token.view(-1)[slot].long() << 6 | 63
    old_code |= (mine[:, None] << 37).expand(n, E)[old]
    seen = (token >= 0) & (weight > 0)
    code = (owner << 37) | bit
    code = (code[:, None] | (token.long() << 6))[seen]
    code, order = torch.cat([code, old_code]).sort()
    weight = torch.cat([weight[seen], table.succ_weight.view(-1)[slot]])[order].long()
    # each run's sources as two sums: bits of the call, a repeated one once, and what was there
    bit = code & 63
    told = torch.where(_starts(code) & (bit < 63), 1 << bit, 0)
    held = torch.zeros_like(code)
    held[bit == 63] = table.succ_source.view(-1)[slot][order[bit == 63] - seen.sum()]

    code >>= 6
    first = _starts(code)
    run, code = first.cumsum(0) - 1, code[first]
    zeros = torch.zeros_like(code)
    weight = zeros.index_add(0, run, weight)
    source = zeros.index_add(0, run, told) | zeros.index_add(0, run, held)

    # the runs are in (owner, token) order: a stable sort by weight leaves ties to smaller tokens
    rank_code, order = (((code >> 31) << 31) | ((1 << 31) - 1 - weight)).sort(stable=True)
    rank = _rank(_starts(rank_code >> 31))
    keep = rank < E
    order, at = order[keep], ((rank_code >> 31) * E + rank)[keep]
    out = torch.zeros(3, n * E, dtype=torch.int64, device=device)
    out[0, at], out[1, at], out[2, at] = code[order] & ((1 << 31) - 1), weight[order], source[order]
    token, weight, source = out.view(3, n, E).unbind()

    total = table.entry_total[safe].long().index_add(0, owner, row_total.long())
    half = (total > MAX_TOTAL).long()
    weight = weight >> half[:, None]
    ok = place >= 0
    place = place[ok]
    table.entry_total[place] = (total >> half)[ok].int()
    table.succ_token[place] = torch.where(weight > 0, token, -1)[ok].int()
    table.succ_weight[place] = weight[ok].int()
    table.succ_source[place] = torch.where(weight > 0, source, 0)[ok]
