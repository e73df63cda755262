"""Add observations to the consensus graph.

Row r says: after context[r], at every order n, the successors succ_token[r] were seen with
succ_weight[r], out of row_total[r]. For each (row, order), in that order:

    leader    the first update of the call with the same context
    entry     the leader's place in the table; a new context takes the first free entry of its
              bucket: empty or of a group that is gone, by index; then the lightest, then the
              oldest, then by index, of those the call does not touch; else it is dropped
    merge     total += row_total; a token that is there adds its weight, then each other token
              takes an empty place, or the lightest one's if it weighs more

The updates of a context are merged in row order by one owner, so the graph is the same however
the work is spread. A total past 2^30 halves the context.
"""

import torch

from csd.graph.table import MAX_TOTAL, WAYS, Table, context_hashes, find

_NEVER = torch.iinfo(torch.int64).max


def graph_insert_ref(
    table: Table,
    group: torch.Tensor,  # [R] int64, -1 skips the row
    context: torch.Tensor,  # [R, N] int32, latest first, -1 before the start
    succ_token: torch.Tensor,  # [R, U] int32, distinct in a row, -1 for none
    succ_weight: torch.Tensor,  # [R, U] int32, probability * 2^16
    row_total: torch.Tensor,  # [R] int32
    source_bit: torch.Tensor,  # [R] int64, bits of Table.succ_source
    live_groups: torch.Tensor,  # [G] int64, keys of the groups in flight, -1 for none
    orders: tuple[int, ...],
    stamp: int,
) -> None:
    """Changes `table` in place."""
    order_of = torch.tensor(orders, device=context.device)
    # [R, orders]
    valid = (group >= 0)[:, None] & (context[:, order_of - 1] >= 0)
    hashes = context_hashes(group, context, orders)
    entry, bucket, taken = find(table, group, context, hashes, orders)

    row, which = valid.nonzero(as_tuple=True)
    if not row.numel():
        return
    hashes, entry, bucket, taken = (x[row, which] for x in (hashes, entry, bucket, taken))
    key_group = group[row]
    same = (hashes[:, None] == hashes) & (key_group[:, None] == key_group)
    leader = same.int().argmax(-1)
    first = leader == torch.arange(leader.shape[0], device=leader.device)
    place = torch.arange(context.shape[1], device=context.device)
    key = torch.where(place < order_of[which][:, None], context[row], -1)
    # a different context with the leader's hash is dropped
    kept = (key == key[leader]).all(-1)

    fresh = (first & ~taken).nonzero()[:, 0]
    entry = entry.index_put((fresh,), _allocate(table, bucket, entry, fresh, live_groups))
    claimed = fresh[entry[fresh] >= 0]
    e = entry[claimed]
    table.group[e] = key_group[claimed]
    table.hash[e] = hashes[claimed]
    table.tokens[e] = key[claimed]
    table.total[e] = 0
    table.succ_token[e] = -1
    table.succ_weight[e] = 0
    table.succ_source[e] = 0

    entry = torch.where(kept, entry[leader], -1)
    # how many updates of the same context come before
    turn = (same & (entry >= 0)).tril(-1).sum(-1)
    update = (entry >= 0).nonzero()[:, 0]
    for t in range(int(turn.max()) + 1):
        now = update[turn[update] == t]
        r = row[now]
        _merge(
            table, entry[now], succ_token[r], succ_weight[r], row_total[r], source_bit[r], stamp
        )


def _allocate(table: Table, bucket, entry, fresh, live_groups) -> torch.Tensor:
    """Entries for new contexts, -1 where the bucket has none to give."""
    ways = bucket[fresh][:, None] * WAYS + torch.arange(WAYS, device=bucket.device)
    group = table.group[ways]
    alive = (group[..., None] == live_groups).any(-1) & (group >= 0)
    weight = (1 << 61) + (table.total[ways].long() << 31) + table.stamp[ways]
    weight = torch.where(alive, weight, 0)
    touched = torch.zeros_like(table.group, dtype=torch.bool)
    touched[entry[entry >= 0]] = True
    weight = torch.where(touched[ways], _NEVER, weight)
    weight, order = weight.sort(dim=-1, stable=True)
    # the n-th new context of a bucket takes its n-th entry
    rank = (bucket[fresh][:, None] == bucket[fresh]).tril(-1).sum(-1)
    chosen = rank.clamp(max=WAYS - 1)[:, None]
    free = (rank < WAYS) & (weight.gather(1, chosen)[:, 0] < _NEVER)
    return torch.where(free, ways.gather(1, order.gather(1, chosen))[:, 0], -1)


def _merge(table: Table, entry, token, weight, row_total, source, stamp) -> None:
    """One update each for distinct entries."""
    have, sums = table.succ_token[entry], table.succ_weight[entry]
    sources = table.succ_source[entry]
    # [n, U, E]
    same = (have[:, None, :] == token[:, :, None]) & (token[:, :, None] >= 0)
    sums = sums + (same * weight[:, :, None]).sum(1, dtype=torch.int32)
    sources = torch.where(same.any(1), sources | source[:, None], sources)
    missing = (token >= 0) & (weight > 0) & ~same.any(-1)
    spots = torch.arange(have.shape[1], device=have.device)
    for u in missing.any(0).nonzero()[:, 0].tolist():
        # an empty place weighs nothing
        lightest, at = sums.min(-1)
        write = missing[:, u] & (weight[:, u] > lightest)
        spot = (spots == at[:, None]) & write[:, None]
        have = torch.where(spot, token[:, u, None], have)
        sums = torch.where(spot, weight[:, u, None], sums)
        sources = torch.where(spot, source[:, None], sources)
    total = table.total[entry] + row_total
    heavy = total > MAX_TOTAL
    table.total[entry] = torch.where(heavy, total // 2, total)
    table.succ_token[entry] = have
    table.succ_weight[entry] = torch.where(heavy[:, None], sums // 2, sums)
    table.succ_source[entry] = sources
    table.stamp[entry] = stamp
