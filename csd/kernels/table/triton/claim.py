"""The first two of the four launches of an insert: find every key's entry, and every key's leader.

A key is a row's context of one order: k = row * O + order. The launches:

    claim       hash of each key, and its entry in the table as it is; a step's rows are observed
                by the same launch (`observe.py`)
    lead        leader of each key: the first key of equal hash, found by comparing all pairs, which
                needs no lock and gives the same result in every run; the updates of keys of equal
                hash are copied next to each other
    allocate    entries for contexts that are new (`merge.py`)
    merge       each leader adds its keys' updates to its entry (`merge.py`)

A launch reads what the one before it wrote; within a launch no program reads what another writes.
"""

import triton
import triton.language as tl

from csd.kernels.table.triton.lookup import (
    cut_context,
    hash_tokens,
    holds_context,
    load_context,
    order_sizes,
    probe_entries,
)


@triton.jit
def claim_rows(
    row,  # [BLOCK_R]
    group,  # [BLOCK_R] int64
    context,  # [BLOCK_R, BLOCK_N] int32
    entries,  # pointers of the table: entry_group, entry_hash and entry_tokens
    keys,  # pointers, out: code and entry of each key
    rows,
    buckets,
    N: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Writes hash and entry of every key of the rows."""
    entry_group_ptr, entry_hash_ptr, entry_tokens_ptr = entries
    code_ptr, entry_ptr = keys
    O: tl.constexpr = len(ORDERS)
    size = order_sizes(ORDERS, BLOCK_O)
    # [BLOCK_R, BLOCK_O, BLOCK_N], then [BLOCK_R, BLOCK_O]
    tokens = cut_context(context, size)
    code = hash_tokens(tokens, group, size, HASH)
    # an order for which the row has enough tokens has an oldest token, which is not -1
    offs_n = tl.arange(0, context.shape[1])[None, None, :]
    oldest = tl.max(tl.where(offs_n == size[None, :, None] - 1, tokens, -1), 2)
    exists = (oldest >= 0) & (group >= 0)[:, None]
    entry, present = probe_entries(code, exists, entry_hash_ptr, buckets, WAYS)
    held = holds_context(entry, present, group, tokens, entry_group_ptr, entry_tokens_ptr, N)
    entry = tl.where(held, entry, -1)
    order = tl.arange(0, BLOCK_O)[None, :]
    key = row[:, None] * O + order
    mask = (row < rows)[:, None] & (order < O)
    tl.store(code_ptr + key, code, mask=mask)
    tl.store(entry_ptr + key, tl.where(exists, entry, -2), mask=mask)


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
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.load(group_key_ptr + row, mask=row < rows, other=-1)
    context = load_context(context_ptr, row, row < rows, N, BLOCK_N)
    entries, keys = (entry_group_ptr, entry_hash_ptr, entry_tokens_ptr), (code_ptr, entry_ptr)
    claim_rows(row, group, context, entries, keys, rows, buckets, N, ORDERS, BLOCK_O, HASH, WAYS)


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
    entry_stamp_ptr,  # [C] int32, out for entries that are touched
    want_ptr,  # [K] int32, out: bucket in which the key needs an entry, or -1
    place_ptr,  # [K] int32, out: a leader's entry if the context has one, else -1
    start_ptr,  # [K] int32, out: for a leader, where the updates of its hash begin
    count_ptr,  # [K] int32, out: number of these updates
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
        there = tl.load(entry_ptr + other, mask=other < keys, other=-2) > -2
        same = there & (other_code == code[None, :])
        less = there & (other_code < code[None, :])
        before += (less | (same & (other < key[None, :]))).to(tl.int32)
        equal += same.to(tl.int32)
        first = tl.minimum(first, tl.where(same, other, keys))
    # a leader's place is where the updates of its hash begin
    to, count = tl.sum(before, 0), tl.sum(equal, 0)
    leader = tl.where(exists, tl.min(first, 0), 0)

    # a key that only shares its leader's hash is dropped
    row, leader_row = key // O, leader // O
    group = tl.load(group_key_ptr + row, mask=exists, other=-1)
    valid = exists & (tl.load(group_key_ptr + leader_row, mask=exists, other=-1) == group)
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
    valid &= tl.min((tokens == leader_tokens).to(tl.int32), 1) > 0

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
    total = tl.load(row_total_ptr + row, mask=valid, other=0)
    bit = tl.load(source_bit_ptr + row, mask=valid, other=0)
    tl.store(update_total_ptr + to, total, mask=exists)
    tl.store(update_bit_ptr + to, bit, mask=exists)
    # [BLOCK_K, BLOCK_U]
    offs_u = tl.arange(0, BLOCK_U)[None, :]
    in_row = offs_u < U
    offsets = row[:, None] * U + offs_u
    token = tl.load(succ_token_ptr + offsets, mask=valid[:, None] & in_row, other=-1)
    weight = tl.load(succ_weight_ptr + offsets, mask=valid[:, None] & in_row, other=0)
    to = to[:, None] * U + offs_u
    tl.store(update_token_ptr + to, token, mask=exists[:, None] & in_row)
    tl.store(update_weight_ptr + to, weight, mask=exists[:, None] & in_row)
