"""Who inserts what where: the first two kernels of `csd/kernels/graph_insert.py`.

A key is a row's context of one order: k = row * O + order. Three launches:

    claim       leader of each key: the first key of equal hash, found by comparing all pairs, which
                needs no lock and gives the same answer on every run
    allocate    room for contexts that are new; each key's update is copied behind those of the
                other keys of its leader
    merge       each leader adds its keys' updates to its entry: `graph_merge_kernel.py`

A launch sees what the one before it wrote; within a launch no program reads what another writes.
"""

import triton
import triton.language as tl

from csd.kernels import graph_insert_ref
from csd.kernels.graph_lookup_kernel import (
    cut_context,
    find_entries,
    hash_tokens,
    load_context,
    order_sizes,
)

MAX_AGE = tl.constexpr(graph_insert_ref.MAX_AGE)


@triton.jit
def _hash_rows(
    row,
    rows,
    group_key_ptr,
    context_ptr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
):
    """Group [B], tokens [B, O, N], hash [B, O] and whether there is such a context, of rows [B]."""
    size = order_sizes(ORDERS, BLOCK_O)
    group = tl.load(group_key_ptr + row, mask=row < rows, other=-1)
    context = load_context(context_ptr, row, row < rows, N, BLOCK_N)
    tokens = cut_context(context, size)
    code = hash_tokens(tokens, group, size, HASH)
    # the oldest token of an order that has tokens enough is not -1
    offs_n = tl.arange(0, BLOCK_N)[None, None, :]
    oldest = tl.max(tl.where(offs_n == size[None, :, None] - 1, tokens, -1), 2)
    return group, tokens, code, (oldest >= 0) & (group >= 0)[:, None]


@triton.jit(do_not_specialize=["rows", "buckets"])
def _claim_kernel(
    group_key_ptr,  # [R] int64
    context_ptr,  # [R, N] int32
    entry_group_ptr,  # [C] int64
    entry_hash_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    entry_stamp_ptr,  # [C] int32
    step_ptr,  # [1] int32
    code_ptr,  # [K] int64, out: hash
    leader_ptr,  # [K] int32, out: leading key, -1 when there is no such context
    rank_ptr,  # [K] int32, out: equal hashes before the key; -1 - that when it is dropped
    entry_ptr,  # [K] int32, out: entry of the context as the table is, or -1
    want_ptr,  # [K] int32, out: bucket in which the key wants room, or -1
    rows,
    buckets,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    O: tl.constexpr = len(ORDERS)
    BLOCK_K: tl.constexpr = BLOCK_R * BLOCK_O
    # [BLOCK_R], then [BLOCK_R, BLOCK_O]
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group, tokens, code, exists = _hash_rows(
        row, rows, group_key_ptr, context_ptr, N, BLOCK_N, ORDERS, BLOCK_O, HASH
    )
    order = tl.arange(0, BLOCK_O)[None, :]
    key = row[:, None] * O + order
    entry = find_entries(
        code, group, tokens, exists, entry_group_ptr, entry_hash_ptr, entry_tokens_ptr, buckets,
        N, WAYS,
    )  # fmt: skip

    # [1, BLOCK_K]
    codes = tl.reshape(code, [1, BLOCK_K])
    keys = tl.reshape(key, [1, BLOCK_K])
    # [BLOCK_J * BLOCK_O, BLOCK_K]
    leaders = tl.zeros([BLOCK_J * BLOCK_O, BLOCK_K], tl.int32) + keys
    ranks = tl.zeros([BLOCK_J * BLOCK_O, BLOCK_K], tl.int32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK_R, BLOCK_J):
        other_row = start + tl.arange(0, BLOCK_J)
        _, _, other_code, other_exists = _hash_rows(
            other_row, rows, group_key_ptr, context_ptr, N, BLOCK_N, ORDERS, BLOCK_O, HASH
        )
        other_key = tl.where(other_exists, other_row[:, None] * O + order, (1 << 31) - 1)
        other_code = tl.reshape(other_code, [BLOCK_J * BLOCK_O, 1])
        other_key = tl.reshape(other_key, [BLOCK_J * BLOCK_O, 1])
        earlier = (other_code == codes) & (other_key < keys)
        leaders = tl.minimum(leaders, tl.where(earlier, other_key, keys))
        ranks += earlier.to(tl.int32)

    # a key that only shares its leader's hash is dropped
    leader = tl.reshape(tl.min(leaders, 0), [BLOCK_R, BLOCK_O])
    rank = tl.reshape(tl.sum(ranks, 0), [BLOCK_R, BLOCK_O])
    leader_row, leader_order = leader // O, leader % O
    same = tl.load(group_key_ptr + leader_row, mask=exists, other=-1) == group[:, None]
    size = order_sizes(ORDERS, BLOCK_O)
    # [BLOCK_R, BLOCK_O, BLOCK_O]: tokens of the leader's order
    pick = leader_order[:, :, None] == tl.arange(0, BLOCK_O)[None, None, :]
    leader_size = tl.sum(tl.where(pick, size[None, None, :], 0), 2)
    # [BLOCK_R, BLOCK_O, BLOCK_N]
    offs_n = tl.arange(0, BLOCK_N)[None, None, :]
    at = context_ptr + leader_row[:, :, None] * N + offs_n
    inside = exists[:, :, None] & (offs_n < leader_size[:, :, None])
    leader_tokens = tl.load(at, mask=inside, other=-1)
    same &= tl.min((leader_tokens == tokens).to(tl.int32), 2) > 0

    leads = exists & (leader == key)
    mask = (row < rows)[:, None] & (order < O)
    tl.store(code_ptr + key, code, mask=mask)
    tl.store(leader_ptr + key, tl.where(exists, leader, -1), mask=mask)
    tl.store(rank_ptr + key, tl.where(same, rank, -1 - rank), mask=mask)
    tl.store(entry_ptr + key, entry, mask=mask)
    bucket = (code & (buckets - 1)).to(tl.int32)
    tl.store(want_ptr + key, tl.where(leads & (entry < 0), bucket, -1), mask=mask)
    now = tl.load(step_ptr) + 1
    tl.store(entry_stamp_ptr + entry, now + 0 * entry, mask=leads & (entry >= 0))


@triton.jit
def _room(
    want,  # [B] bucket, or -1
    turn,  # [B] keys before this one that want room in the bucket
    now,
    entry_group_ptr,  # [C] int64
    entry_total_ptr,  # [C] int32
    entry_stamp_ptr,  # [C] int32
    live_groups_ptr,  # [G] int64
    groups,
    WAYS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """[B] entry each key may take, -1 where none is left."""
    # [B, WAYS]
    way = tl.arange(0, WAYS)[None, :]
    wants = (want >= 0)[:, None]
    at = want[:, None] * WAYS + way
    group = tl.load(entry_group_ptr + at, mask=wants, other=-1)
    total = tl.load(entry_total_ptr + at, mask=wants, other=0)
    stamp = tl.load(entry_stamp_ptr + at, mask=wants, other=0)
    alive = tl.zeros(group.shape, tl.int32)
    for start in range(0, groups, BLOCK_G):
        offs_g = start + tl.arange(0, BLOCK_G)
        live = tl.load(live_groups_ptr + offs_g, mask=offs_g < groups, other=-1)
        alive |= tl.max((group[:, :, None] == live[None, None, :]).to(tl.int32), 2)
    alive = (alive > 0) & (group >= 0)
    # the empty and dead first, then the lightest, then the oldest; what this call touched is kept
    age = tl.minimum(now - stamp, MAX_AGE).to(tl.int64)
    busy = tl.full((), 1 << 62, tl.int64)
    cost = (total.to(tl.int64) << 30) | ((tl.full((), MAX_AGE, tl.int64) - age) << 4)
    cost = tl.where(alive, tl.where(stamp == now, busy, cost) | way, (way - WAYS).to(tl.int64))
    # [B, WAYS, WAYS]
    place = tl.sum((cost[:, None, :] < cost[:, :, None]).to(tl.int32), 2)
    mine = (place == turn[:, None]) & (cost < busy) & wants
    return tl.max(tl.where(mine, at, -1), 1)


@triton.jit(do_not_specialize=["keys", "groups"])
def _allocate_kernel(
    leader_ptr,  # [K] int32
    rank_ptr,  # [K] int32
    entry_ptr,  # [K] int32
    want_ptr,  # [K] int32
    entry_group_ptr,  # [C] int64
    entry_total_ptr,  # [C] int32
    entry_stamp_ptr,  # [C] int32
    live_groups_ptr,  # [G] int64
    step_ptr,  # [1] int32
    dropped_ptr,  # [1] int64
    succ_token_ptr,  # [R, U] int32
    succ_weight_ptr,  # [R, U] int32
    row_total_ptr,  # [R] int32
    source_bit_ptr,  # [R] int32
    place_ptr,  # [K] int32, out: a leader's entry, -1 where it found no room
    start_ptr,  # [K] int32, out: where a leader's updates begin
    count_ptr,  # [K] int32, out: how many they are
    update_token_ptr,  # [K, U] int32, out: updates in order of leader, then key
    update_weight_ptr,  # [K, U] int32, out
    update_total_ptr,  # [K] int32, out
    update_bit_ptr,  # [K] int32, out
    now_ptr,  # [1] int32, out: this insert's number
    keys,
    groups,
    O: tl.constexpr,
    U: tl.constexpr,
    BLOCK_U: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    # [BLOCK_K]
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = key < keys
    leader = tl.load(leader_ptr + key, mask=mask, other=-1)
    want = tl.load(want_ptr + key, mask=mask, other=-1)
    # [BLOCK_J, BLOCK_K]
    start = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    count = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    turn = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    for j in range(0, keys, BLOCK_J):
        # [BLOCK_J, 1]
        other = j + tl.arange(0, BLOCK_J)[:, None]
        other_leader = tl.load(leader_ptr + other, mask=other < keys, other=-1)
        other_want = tl.load(want_ptr + other, mask=other < keys, other=-1)
        start += ((other_leader >= 0) & (other_leader < leader[None, :])).to(tl.int32)
        count += (other_leader == leader[None, :]).to(tl.int32)
        turn += ((other_want == want[None, :]) & (other < key[None, :])).to(tl.int32)
    start, count, turn = tl.sum(start, 0), tl.sum(count, 0), tl.sum(turn, 0)

    now = tl.load(step_ptr) + 1
    place = tl.load(entry_ptr + key, mask=mask & (leader == key), other=-1)
    if tl.max(want, 0) >= 0:
        room = _room(
            want, turn, now, entry_group_ptr, entry_total_ptr, entry_stamp_ptr, live_groups_ptr,
            groups, WAYS, BLOCK_G,
        )  # fmt: skip
        place = tl.where(want >= 0, room, place)
        lost = tl.sum(((want >= 0) & (room < 0)).to(tl.int64), 0)
        if lost > 0:
            # integers: the sum does not depend on who comes first
            tl.atomic_add(dropped_ptr, lost)
    tl.store(place_ptr + key, place, mask=mask)
    tl.store(start_ptr + key, start, mask=mask)
    tl.store(count_ptr + key, count, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(now_ptr, now)

    # a dropped key leaves its place empty
    rank = tl.load(rank_ptr + key, mask=mask, other=0)
    exists = leader >= 0
    kept = exists & (rank >= 0)
    to = start + tl.where(rank >= 0, rank, -1 - rank)
    row = key // O
    total = tl.load(row_total_ptr + row, mask=kept, other=0)
    bit = tl.load(source_bit_ptr + row, mask=kept, other=0)
    tl.store(update_total_ptr + to, total, mask=exists)
    tl.store(update_bit_ptr + to, bit, mask=exists)
    # [BLOCK_K, BLOCK_U]
    offs_u = tl.arange(0, BLOCK_U)[None, :]
    in_row = offs_u < U
    at = row[:, None] * U + offs_u
    token = tl.load(succ_token_ptr + at, mask=kept[:, None] & in_row, other=-1)
    weight = tl.load(succ_weight_ptr + at, mask=kept[:, None] & in_row, other=0)
    to = to[:, None] * U + offs_u
    tl.store(update_token_ptr + to, token, mask=exists[:, None] & in_row)
    tl.store(update_weight_ptr + to, weight, mask=exists[:, None] & in_row)
