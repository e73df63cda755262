"""Hash every key and find its entry: the first of the four launches of an insert.

A key is a row's context of one order: k = row * O + order. The launches:

    claim       hash of each key, and its entry in the table as it is; a step's rows are observed
                by the same launch
    lead        leader of each key: the first key of equal hash, found by comparing all pairs, which
                needs no lock and gives the same result in every run; the updates of keys of equal
                hash are copied next to each other
    allocate    entries for contexts that are new
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
from csd.kernels.observe_rows import observe_rows


@triton.jit
def claim_rows(
    row,  # [BLOCK_R]
    group,  # [BLOCK_R] int64
    context,  # [BLOCK_R, BLOCK_N] int32
    entry_group_ptr,
    entry_hash_ptr,
    entry_tokens_ptr,
    code_ptr,
    entry_ptr,
    rows,
    buckets,
    N: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Writes hash and entry of every key of the rows."""
    O: tl.constexpr = len(ORDERS)
    size = order_sizes(ORDERS, BLOCK_O)
    # [BLOCK_R, BLOCK_O, BLOCK_N], then [BLOCK_R, BLOCK_O]
    tokens = cut_context(context, size)
    code = hash_tokens(tokens, group, size, HASH)
    # an order for which the row has enough tokens has an oldest token, which is not -1
    offs_n = tl.arange(0, context.shape[1])[None, None, :]
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
    claim_rows(
        row, group, context, entry_group_ptr, entry_hash_ptr, entry_tokens_ptr, code_ptr,
        entry_ptr, rows, buckets, N, ORDERS, BLOCK_O, HASH, WAYS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "slots", "buckets"])
def _observe_claim_kernel(
    slot_ptr,  # [M] int32
    depth_ptr,  # [M] int32
    context_ptr,  # [M, N] int32
    group_ptr,  # [S] int32
    sample_index_ptr,  # [S] int32
    group_key_ptr,  # [G] int64
    step_ptr,  # [S] int32
    sample_ptr,  # [M] int32
    top_token_ptr,  # [M, TOP] int32
    top_prob_ptr,  # [M, TOP] float32
    accept_row_ptr,  # [S, A] int32
    out_key_ptr,  # [M + S] int64
    out_context_ptr,  # [M + S, N] int32
    out_token_ptr,  # [M + S, TOP + 1] int32
    out_weight_ptr,  # [M + S, TOP + 1] int32
    out_total_ptr,  # [M + S] int32
    out_bit_ptr,  # [M + S] int32
    entry_group_ptr,  # [C] int64
    entry_hash_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    code_ptr,  # [K] int64, out, as above
    entry_ptr,  # [K] int32, out
    rows,
    slots,
    buckets,
    SOFT: tl.constexpr,
    HARD: tl.constexpr,
    ONE: tl.constexpr,
    ANY: tl.constexpr,
    SAMPLE_BITS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HASH: tl.constexpr,
    WAYS: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Runs `observe` and claims its rows in the same program."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group, context = observe_rows(
        r,
        slot_ptr, depth_ptr, context_ptr, group_ptr, sample_index_ptr, group_key_ptr, step_ptr,
        sample_ptr, top_token_ptr, top_prob_ptr, accept_row_ptr, out_key_ptr, out_context_ptr,
        out_token_ptr, out_weight_ptr, out_total_ptr, out_bit_ptr, rows, slots, SOFT, HARD, ONE,
        ANY, SAMPLE_BITS, GROUP_SLOTS, A, N, BLOCK_N, TOP, BLOCK_U, BLOCK_R, BLOCK_S,
    )  # fmt: skip
    claim_rows(
        r, group, context, entry_group_ptr, entry_hash_ptr, entry_tokens_ptr, code_ptr, entry_ptr,
        rows + slots, buckets, N, ORDERS, BLOCK_O, HASH, WAYS,
    )  # fmt: skip
