"""Find contexts in the graph's table, by the functions of `csd/kernels/table/lookup.py`."""

import triton
import triton.language as tl


@triton.jit
def order_sizes(ORDERS: tl.constexpr, O: tl.constexpr, FIRST: tl.constexpr = 0):
    """[O] int32: number of tokens of each order, from index FIRST on, and 0 elsewhere."""
    offs_o = tl.arange(0, O) - FIRST
    size = tl.zeros([O], tl.int32)
    for i in tl.static_range(len(ORDERS)):
        size = tl.where(offs_o == i, ORDERS[i], size)
    return size


@triton.jit
def load_context(context_ptr, row, mask, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """[B, BLOCK_N] int32: tokens of rows [B], latest first, -1 beyond N."""
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    ptrs = context_ptr + row[:, None] * N + offs_n
    return tl.load(ptrs, mask=mask[:, None] & (offs_n < N), other=-1)


@triton.jit
def cut_context(context, size):
    """[B, O, BLOCK_N]: the last size[o] tokens of each row, -1 beyond; size: [O]."""
    offs_n = tl.arange(0, context.shape[1])
    inside = offs_n[None, None, :] < size[None, :, None]
    return tl.where(inside, context[:, None, :], -1)


@triton.jit
def hash_tokens(tokens, group, size, HASH: tl.constexpr):
    """[B, O] int64: hashes of tokens [B, O, BLOCK_N] in groups [B]; size: [O]."""
    offs_n = tl.arange(0, tokens.shape[2])
    factor = tl.zeros([tokens.shape[2]], tl.int64)
    for i in tl.static_range(len(HASH) - 2):
        factor = tl.where(offs_n == i, tl.full((), HASH[i + 2], tl.int64), factor)
    inside = offs_n[None, None, :] < size[None, :, None]
    part = tl.where(inside, (tokens + 2).to(tl.int64) * factor[None, None, :], 0)
    z = tl.sum(part, 2) + (group * tl.full((), HASH[0], tl.int64))[:, None]
    z = (z ^ (z >> 32)) * tl.full((), HASH[1], tl.int64)
    return z ^ (z >> 29)


@triton.jit
def probe_entries(
    code,  # [B, O] int64
    mask,  # [B, O]
    entry_hash_ptr,  # [C] int64
    buckets,
    WAYS: tl.constexpr,
):
    """[B, O] int32: the first entry with each hash in its bucket; [B, O] bool: if there is one."""
    offs_w = tl.arange(0, WAYS)[None, None, :]
    base = (code & (buckets - 1)).to(tl.int32) * WAYS
    # [B, O, WAYS]
    held = tl.load(entry_hash_ptr + base[:, :, None] + offs_w, mask=mask[:, :, None], other=0)
    same = mask[:, :, None] & (held == code[:, :, None])
    way = tl.min(tl.where(same, offs_w, WAYS), 2)
    return base + way, way < WAYS


@triton.jit
def holds_context(
    entry,  # [B, O] int32
    present,  # [B, O]: whether there is an entry
    group,  # [B] int64
    tokens,  # [B, O, BLOCK_N] int32
    entry_group_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    N: tl.constexpr,
):
    """[B, O] bool: True if the entry holds this context, not another with the same hash."""
    offs_n = tl.arange(0, tokens.shape[2])[None, None, :]
    ptrs = entry_tokens_ptr + entry[:, :, None].to(tl.int64) * N + offs_n
    # [B, O], [B, O, BLOCK_N]: neither load waits for the other
    held_group = tl.load(entry_group_ptr + entry, mask=present, other=-1)
    held_tokens = tl.load(ptrs, mask=present[:, :, None] & (offs_n < N), other=-1)
    equal = tl.min((held_tokens == tokens).to(tl.int32), 2) > 0
    return present & (held_group == group[:, None]) & equal
