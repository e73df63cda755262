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

from typing import NamedTuple

import torch
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
from csd.state.record import named, tensor


@named
class Keys(NamedTuple):
    """K keys, and the updates of rows with U successors, in order of hash, then key."""

    code: torch.Tensor = tensor("K", torch.int64)  # hash
    entry: torch.Tensor = tensor("K")  # of the context as the table is, -1 absent, -2 no context
    want: torch.Tensor = tensor("K")  # bucket in which the key needs an entry, or -1
    # a leader's entry, if it has one; else -1
    place: torch.Tensor = tensor("K")
    # first update of a leader's hash, and the number of its updates
    start: torch.Tensor = tensor("K")
    count: torch.Tensor = tensor("K")
    token: torch.Tensor = tensor("K U")
    weight: torch.Tensor = tensor("K U")
    total: torch.Tensor = tensor("K")
    bit: torch.Tensor = tensor("K")
    now: torch.Tensor = tensor("1")  # this insert's number


class Contexts(NamedTuple):
    """Constants of the contexts of rows."""

    N: int
    BLOCK_N: int
    ORDERS: tuple[int, ...] = ()
    BLOCK_O: int = 1
    HASH: tuple[int, ...] = ()
    WAYS: int = 1


@triton.jit
def claim_rows(
    row,  # [BLOCK_R]
    group,  # [BLOCK_R] int64
    context,  # [BLOCK_R, BLOCK_N] int32
    table,
    keys,  # out: code and entry
    R,
    buckets,
    C: tl.constexpr,
):
    """Writes hash and entry of every key of the rows."""
    ORDERS: tl.constexpr = C.ORDERS
    HASH: tl.constexpr = C.HASH
    O: tl.constexpr = len(ORDERS)
    BLOCK_O: tl.constexpr = C.BLOCK_O
    size = order_sizes(ORDERS, BLOCK_O)
    # [BLOCK_R, BLOCK_O, BLOCK_N], then [BLOCK_R, BLOCK_O]
    tokens = cut_context(context, size)
    code = hash_tokens(tokens, group, size, HASH)
    # an order for which the row has enough tokens has an oldest token, which is not -1
    offs_n = tl.arange(0, context.shape[1])[None, None, :]
    oldest = tl.max(tl.where(offs_n == size[None, :, None] - 1, tokens, -1), 2)
    exists = (oldest >= 0) & (group >= 0)[:, None]
    entry, present = probe_entries(code, exists, table.entry_hash, buckets, C.WAYS)
    held = holds_context(entry, present, group, tokens, table.entry_group, table.entry_tokens, C.N)
    entry = tl.where(held, entry, -1)
    order = tl.arange(0, BLOCK_O)[None, :]
    key = row[:, None] * O + order
    mask = (row < R)[:, None] & (order < O)
    tl.store(keys.code + key, code, mask=mask)
    tl.store(keys.entry + key, tl.where(exists, entry, -2), mask=mask)


@triton.jit(do_not_specialize=["R", "buckets"])
def claim_kernel(rows, table, keys, R, buckets, C: tl.constexpr, BLOCK_R: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.load(rows.group_key + row, mask=row < R, other=-1)
    context = load_context(rows.context, row, row < R, C.N, C.BLOCK_N)
    claim_rows(row, group, context, table, keys, R, buckets, C)


@triton.jit(do_not_specialize=["K", "buckets"])
def lead_kernel(
    rows,
    table,  # written: the stamp of entries that are touched
    keys,  # written: all but code and entry
    K,
    buckets,
    C: tl.constexpr,
    U: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    ORDERS: tl.constexpr = C.ORDERS
    O: tl.constexpr = len(ORDERS)
    BLOCK_O: tl.constexpr = C.BLOCK_O
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # [BLOCK_K]
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = key < K
    code = tl.load(keys.code + key, mask=mask, other=0)
    entry = tl.load(keys.entry + key, mask=mask, other=-2)
    exists = entry > -2
    # [BLOCK_J, BLOCK_K]: keys before it in order of hash, those of equal hash, the first of these
    before = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    equal = tl.zeros([BLOCK_J, BLOCK_K], tl.int32)
    first = tl.zeros([BLOCK_J, BLOCK_K], tl.int32) + K
    for j in range(0, K, BLOCK_J):
        # [BLOCK_J, 1]
        other = j + tl.arange(0, BLOCK_J)[:, None]
        other_code = tl.load(keys.code + other, mask=other < K, other=0)
        there = tl.load(keys.entry + other, mask=other < K, other=-2) > -2
        same = there & (other_code == code[None, :])
        less = there & (other_code < code[None, :])
        before += (less | (same & (other < key[None, :]))).to(tl.int32)
        equal += same.to(tl.int32)
        first = tl.minimum(first, tl.where(same, other, K))
    # a leader's place is where the updates of its hash begin
    to, count = tl.sum(before, 0), tl.sum(equal, 0)
    leader = tl.where(exists, tl.min(first, 0), 0)

    # a key that only shares its leader's hash is dropped
    row, leader_row = key // O, leader // O
    group = tl.load(rows.group_key + row, mask=exists, other=-1)
    valid = exists & (tl.load(rows.group_key + leader_row, mask=exists, other=-1) == group)
    # [BLOCK_K, BLOCK_N]
    size = order_sizes(ORDERS, BLOCK_O)[None, :]
    offs_o = tl.arange(0, BLOCK_O)[None, :]
    own_size = tl.sum(tl.where((key % O)[:, None] == offs_o, size, 0), 1)
    leader_size = tl.sum(tl.where((leader % O)[:, None] == offs_o, size, 0), 1)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    own = exists[:, None] & (offs_n < own_size[:, None])
    tokens = tl.load(rows.context + row[:, None] * C.N + offs_n, mask=own, other=-1)
    of_leader = exists[:, None] & (offs_n < leader_size[:, None])
    leader_at = rows.context + leader_row[:, None] * C.N + offs_n
    leader_tokens = tl.load(leader_at, mask=of_leader, other=-1)
    valid &= tl.min((tokens == leader_tokens).to(tl.int32), 1) > 0

    leads = exists & (leader == key)
    now = tl.load(table.step) + 1
    if tl.program_id(0) == 0:
        tl.store(keys.now, now)
    tl.store(table.entry_stamp + entry, now + 0 * entry, mask=leads & (entry >= 0))
    bucket = (code & (buckets - 1)).to(tl.int32)
    tl.store(keys.want + key, tl.where(leads & (entry < 0), bucket, -1), mask=mask)
    tl.store(keys.place + key, tl.where(leads, tl.maximum(entry, -1), -1), mask=mask)
    tl.store(keys.start + key, to, mask=mask)
    tl.store(keys.count + key, count, mask=mask)

    # a dropped key leaves its place empty
    total = tl.load(rows.row_total + row, mask=valid, other=0)
    bit = tl.load(rows.source_bit + row, mask=valid, other=0)
    tl.store(keys.total + to, total, mask=exists)
    tl.store(keys.bit + to, bit, mask=exists)
    # [BLOCK_K, BLOCK_U]
    offs_u = tl.arange(0, BLOCK_U)[None, :]
    in_row = offs_u < U
    offsets = row[:, None] * U + offs_u
    token = tl.load(rows.succ_token + offsets, mask=valid[:, None] & in_row, other=-1)
    weight = tl.load(rows.succ_weight + offsets, mask=valid[:, None] & in_row, other=0)
    to = to[:, None] * U + offs_u
    tl.store(keys.token + to, token, mask=exists[:, None] & in_row)
    tl.store(keys.weight + to, weight, mask=exists[:, None] & in_row)
