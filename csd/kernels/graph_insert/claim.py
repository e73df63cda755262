"""Hash every key and find its entry: the first of the four launches of an insert.

A key is a row's context of one order: k = row * O + order. The launches:

    claim       hash of each key, and its entry as the table is
    lead        leader of each key: the first key of equal hash, found by comparing all pairs, which
                needs no lock and gives the same answer on every run; each key's update is copied
                behind those of the other keys of its hash
    allocate    room for contexts that are new
    merge       each leader adds its keys' updates to its entry

A launch reads what the one before it wrote; within a launch no program reads what another writes.
"""

import triton
import triton.language as tl

from csd.kernels.graph_lookup import (
    cut_context,
    find_entries,
    hash_tokens,
    load_context,
    order_sizes,
)


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
