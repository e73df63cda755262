"""Who inserts what where: the first three kernels of `csd/kernels/graph_insert.py`.

A key is a row's context of one order: k = row * O + order. Four launches:

    claim       hash of each key, and its entry as the table is
    lead        leader of each key: the first key of equal hash, found by comparing all pairs, which
                needs no lock and gives the same answer on every run; each key's update is copied
                behind those of the other keys of its hash
    allocate    room for contexts that are new
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


@triton.jit(do_not_specialize=["rows", "buckets"])
def _claim_kernel(
    group_key_ptr,  # [R] int64
    context_ptr,  # [R, N] int32
    entry_group_ptr,  # [C] int64
    entry_hash_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    code_ptr,  # [K] int64, out: hash
    entry_ptr,  # [K] int32, out: entry of the context as the table is, -1 absent, -2 no context
    rows,
    buckets,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    O: tl.constexpr = len(ORDERS)
    # [BLOCK_R], then [BLOCK_R, BLOCK_O]
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    size = order_sizes(ORDERS, BLOCK_O)
    group = tl.load(group_key_ptr + row, mask=row < rows, other=-1)
    context = load_context(context_ptr, row, row < rows, N, BLOCK_N)
    tokens = cut_context(context, size)
    code = hash_tokens(tokens, group, size, HASH)
    # the oldest token of an order that has tokens enough is not -1
    offs_n = tl.arange(0, BLOCK_N)[None, None, :]
    oldest = tl.max(tl.where(offs_n == size[None, :, None] - 1, tokens, -1), 2)
    exists = (oldest >= 0) & (group >= 0)[:, None]
    entry = find_entries(
        code, group, tokens, exists, entry_group_ptr, entry_hash_ptr, entry_tokens_ptr, buckets,
        N, WAYS,
    )  # fmt: skip
    order = tl.arange(0, BLOCK_O)[None, :]
    key = row[:, None] * O + order
    mask = (row < rows)[:, None] & (order < O)
    tl.store(code_ptr + key, code, mask=mask)
    tl.store(entry_ptr + key, tl.where(exists, entry, -2), mask=mask)


@triton.jit(do_not_specialize=["keys", "buckets"])
def _lead_kernel(
    group_key_ptr,  # [R] int64
    context_ptr,  # [R, N] int32
    succ_token_ptr,  # [R, U] int32
    succ_weight_ptr,  # [R, U] int32
    row_total_ptr,  # [R] int32
    source_bit_ptr,  # [R] int32
    code_ptr,  # [K] int64
    entry_ptr,  # [K] int32
    step_ptr,  # [1] int32
    entry_stamp_ptr,  # [C] int32, out: of entries that are touched
    want_ptr,  # [K] int32, out: bucket in which the key wants room, or -1
    place_ptr,  # [K] int32, out: a leader's entry where the context has one, else -1
    start_ptr,  # [K] int32, out: of a leader, where the updates of its hash begin
    count_ptr,  # [K] int32, out: how many they are
    update_token_ptr,  # [K, U] int32, out: updates in order of hash, then key
    update_weight_ptr,  # [K, U] int32, out
    update_total_ptr,  # [K] int32, out
    update_bit_ptr,  # [K] int32, out
    now_ptr,  # [1] int32, out: this insert's number
    keys,
    buckets,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    U: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    O: tl.constexpr = len(ORDERS)
    # [BLOCK_K]
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = key < keys
    code = tl.load(code_ptr + key, mask=mask, other=0)
    entry = tl.load(entry_ptr + key, mask=mask, other=-2)
    exists = entry > -2
    # [BLOCK_J, BLOCK_K]: keys before it in order of hash, those of equal hash, the first of these
    before = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    equal = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    first = tl.zeros([BLOCK_J, BLOCK_K], tl.int32) + keys
    for j in range(0, keys, BLOCK_J):
        # [BLOCK_J, 1]
        other = j + tl.arange(0, BLOCK_J)[:, None]
        other_code = tl.load(code_ptr + other, mask=other < keys, other=0)
        known = tl.load(entry_ptr + other, mask=other < keys, other=-2) > -2
        same = known & (other_code == code[None, :])
        less = known & (other_code < code[None, :])
        before += (less | (same & (other < key[None, :]))).to(tl.int32)
        equal += same.to(tl.int32)
        first = tl.minimum(first, tl.where(same, other, keys))
    # a leader's place is where the updates of its hash begin
    to, count = tl.sum(before, 0), tl.sum(equal, 0)
    leader = tl.where(exists, tl.min(first, 0), 0)

    # a key that only shares its leader's hash is dropped
    row, leader_row = key // O, leader // O
    group = tl.load(group_key_ptr + row, mask=exists, other=-1)
    kept = exists & (tl.load(group_key_ptr + leader_row, mask=exists, other=-1) == group)
    # [BLOCK_K, BLOCK_N]
    size = order_sizes(ORDERS, BLOCK_O)[None, :]
    offs_o = tl.arange(0, BLOCK_O)[None, :]
    own_size = tl.sum(tl.where((key % O)[:, None] == offs_o, size, 0), 1)
    leader_size = tl.sum(tl.where((leader % O)[:, None] == offs_o, size, 0), 1)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    own = exists[:, None] & (offs_n < own_size[:, None])
    tokens = tl.load(context_ptr + row[:, None] * N + offs_n, mask=own, other=-1)
    of_leader = exists[:, None] & (offs_n < leader_size[:, None])
    leader_at = context_ptr + leader_row[:, None] * N + offs_n
    leader_tokens = tl.load(leader_at, mask=of_leader, other=-1)
    kept &= tl.min((tokens == leader_tokens).to(tl.int32), 1) > 0

    leads = exists & (leader == key)
    now = tl.load(step_ptr) + 1
    if tl.program_id(0) == 0:
        tl.store(now_ptr, now)
    tl.store(entry_stamp_ptr + entry, now + 0 * entry, mask=leads & (entry >= 0))
    bucket = (code & (buckets - 1)).to(tl.int32)
    tl.store(want_ptr + key, tl.where(leads & (entry < 0), bucket, -1), mask=mask)
    tl.store(place_ptr + key, tl.where(leads, tl.maximum(entry, -1), -1), mask=mask)
    tl.store(start_ptr + key, to, mask=mask)
    tl.store(count_ptr + key, count, mask=mask)

    # a dropped key leaves its place empty
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
    # [BLOCK_G, B * WAYS]: threads share out the entries, so that the groups are no reduction
    entries: tl.constexpr = group.shape[0] * WAYS
    groups_of = tl.reshape(group, [1, entries])
    found = tl.zeros([BLOCK_G, entries], tl.int32)
    for start in range(0, groups, BLOCK_G):
        offs_g = start + tl.arange(0, BLOCK_G)[:, None]
        live = tl.load(live_groups_ptr + offs_g, mask=offs_g < groups, other=-1)
        found |= (groups_of == live).to(tl.int32)
    alive = (tl.reshape(tl.max(found, 0), group.shape) > 0) & (group >= 0)
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
    want_ptr,  # [K] int32
    entry_group_ptr,  # [C] int64
    entry_total_ptr,  # [C] int32
    entry_stamp_ptr,  # [C] int32
    live_groups_ptr,  # [G] int64
    now_ptr,  # [1] int32
    dropped_ptr,  # [1] int64
    place_ptr,  # [K] int32, out where a key wants room: its entry, -1 where none is left
    keys,
    groups,
    WAYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    # [BLOCK_K]
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    want = tl.load(want_ptr + key, mask=key < keys, other=-1)
    if tl.max(want, 0) < 0:
        return
    # [BLOCK_J, BLOCK_K]
    turn = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    for j in range(0, (tl.program_id(0) + 1) * BLOCK_K, BLOCK_J):
        # [BLOCK_J, 1]
        other = j + tl.arange(0, BLOCK_J)[:, None]
        other_want = tl.load(want_ptr + other, mask=other < keys, other=-1)
        turn += ((other_want == want[None, :]) & (other < key[None, :])).to(tl.int32)
    room = _room(
        want, tl.sum(turn, 0), tl.load(now_ptr), entry_group_ptr, entry_total_ptr,
        entry_stamp_ptr, live_groups_ptr, groups, WAYS, BLOCK_G,
    )  # fmt: skip
    tl.store(place_ptr + key, room, mask=want >= 0)
    lost = tl.sum(((want >= 0) & (room < 0)).to(tl.int64), 0)
    if lost > 0:
        # integers: the sum does not depend on who comes first
        tl.atomic_add(dropped_ptr, lost)
