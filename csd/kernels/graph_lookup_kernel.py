"""Hash and find contexts inside kernels, as `csd/kernels/graph_lookup.py` defines them.

Tiles are [B, O, ..]: B rows with one context for each of O orders, O rounded up to a power of two.
A constexpr HASH is (group factor, final factor, token factors ..).
"""

import triton
import triton.language as tl

from csd.kernels import graph_lookup


def hash_factors(N: int) -> tuple[int, ...]:
    """HASH for contexts of up to N tokens."""
    factors = graph_lookup.TOKEN_FACTORS[:N].tolist()
    return (int(graph_lookup.GROUP_FACTOR), int(graph_lookup.FINAL_FACTOR), *factors)


@triton.jit
def order_sizes(ORDERS: tl.constexpr, O: tl.constexpr):
    """[O] int32: tokens of each order, 0 beyond."""
    offs_o = tl.arange(0, O)
    size = tl.zeros([O], tl.int32)
    for i in tl.static_range(len(ORDERS)):
        size = tl.where(offs_o == i, ORDERS[i], size)
    return size


@triton.jit
def load_context(context_ptr, row, mask, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """[B, BLOCK_N] int32: tokens of rows [B], latest first, -1 beyond N."""
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    at = context_ptr + row[:, None] * N + offs_n
    return tl.load(at, mask=mask[:, None] & (offs_n < N), other=-1)


@triton.jit
def cut_context(context, size):
    """[B, O, BLOCK_N]: the tokens of each order, -1 beyond; size: [O]."""
    offs_n = tl.arange(0, context.shape[1])
    inside = offs_n[None, None, :] < size[None, :, None]
    return tl.where(inside, context[:, None, :], -1)


@triton.jit
def hash_tokens(tokens, group, size, HASH: tl.constexpr):
    """[B, O] int64 of tokens [B, O, BLOCK_N] in groups [B]; size: [O]."""
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
    """[B, O] int32: the first entry of each hash's bucket that has it, and whether one has."""
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
    found,  # [B, O]: whether there is an entry
    group,  # [B] int64
    tokens,  # [B, O, BLOCK_N] int32
    entry_group_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    N: tl.constexpr,
):
    """[B, O]: whether the entry is the context's."""
    offs_n = tl.arange(0, tokens.shape[2])[None, None, :]
    at = entry_tokens_ptr + entry[:, :, None].to(tl.int64) * N + offs_n
    # [B, O], [B, O, BLOCK_N]: neither waits for the other
    held_group = tl.load(entry_group_ptr + entry, mask=found, other=-1)
    held_tokens = tl.load(at, mask=found[:, :, None] & (offs_n < N), other=-1)
    equal = tl.min((held_tokens == tokens).to(tl.int32), 2) > 0
    return found & (held_group == group[:, None]) & equal


@triton.jit
def find_entries(
    code,  # [B, O] int64
    group,  # [B] int64
    tokens,  # [B, O, BLOCK_N] int32
    mask,  # [B, O]
    entry_group_ptr,  # [C] int64
    entry_hash_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    buckets,
    N: tl.constexpr,
    WAYS: tl.constexpr,
):
    """[B, O] int32: entry of each context, -1 where it is absent."""
    entry, found = probe_entries(code, mask, entry_hash_ptr, buckets, WAYS)
    held = holds_context(entry, found, group, tokens, entry_group_ptr, entry_tokens_ptr, N)
    return tl.where(held, entry, -1)
