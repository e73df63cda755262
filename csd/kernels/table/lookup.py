"""Find contexts in the consensus graph.

The context of order n of a row is its group and its last n tokens t_1 (the latest) .. t_n, -1
before the start. With odd 64-bit constants A_0 .. A_N and B, signed arithmetic modulo 2^64 and
arithmetic shifts:

    z = group A_0 + sum over i = 1 .. n of (t_i + 2) A_i
    z = (z ^ (z >> 32)) B,    hash = z ^ (z >> 29)

Its bucket is hash mod buckets. The first of the bucket's entries with this hash holds the context
if group and tokens agree; if they do not, or if no entry has the hash, the context is absent.

The references of the graph compute in numpy, on the tensors' own memory: for the few elements of a
step a numpy operation takes a quarter of torch's time. Tiles of the kernels are [B, O, ..]: B rows
with one context for each of O orders, O rounded up to a power of two.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import triton
import triton.language as tl

from csd.kernels.common.noise import splitmix64

# an entry touched this many inserts ago or earlier counts as equally old
MAX_AGE = (1 << 26) - 1

MAX_ORDER = 16


def _odd(i: int) -> int:
    x = splitmix64(i) | 1
    return x - (1 << 64) if x >= 1 << 63 else x


GROUP_FACTOR = np.int64(_odd(0))
TOKEN_FACTORS = np.array([_odd(i) for i in range(1, MAX_ORDER + 1)])
FINAL_FACTOR = np.int64(_odd(MAX_ORDER + 1))


@lru_cache
def order_masks(orders: tuple[int, ...], N: int) -> tuple[np.ndarray, np.ndarray]:
    """Index [O] of each order's oldest token, and mask [O, N] of the tokens in its context."""
    last = np.array(orders) - 1
    return last, np.arange(N) <= last[:, None]


def hash_contexts(
    group_key: np.ndarray,  # [R] int64
    context: np.ndarray,  # [R, N], latest first
    orders: tuple[int, ...],
) -> np.ndarray:
    """Hashes [R, O] int64 of the rows' contexts of all orders."""
    last, _ = order_masks(orders, context.shape[1])
    z = ((context + 2) * TOKEN_FACTORS[: context.shape[1]]).cumsum(1)[:, last]
    z += (group_key * GROUP_FACTOR)[:, None]
    z = (z ^ (z >> 32)) * FINAL_FACTOR
    return z ^ (z >> 29)


def find_contexts(
    table: Any,  # csd.state.context_table.Table of arrays
    group_key: np.ndarray,  # [K] int64
    tokens: np.ndarray,  # [K, N], latest first, -1 beyond the context's order
    code: np.ndarray,  # [K] int64, hashes
    part: np.ndarray | int = 0,  # [K], of the table
) -> np.ndarray:
    """Entry [K] of each context, -1 if it is absent."""
    bucket = (code & (table.buckets - 1)) + part * np.int64(table.buckets)
    # [K, ways]
    same = table.entry_hash.reshape(-1, table.ways).take(bucket, 0) == code[:, None]
    entry = bucket * table.ways + same.argmax(1)
    found = table.entry_hash.take(entry) == code
    found &= table.entry_group.take(entry) == group_key
    found &= (table.entry_tokens.take(entry, 0) == tokens).all(1)
    return np.where(found, entry, -1)


def hash_factors(N: int) -> tuple[int, ...]:
    """Constant HASH of the kernels: group factor, final factor, factors of up to N tokens."""
    factors = TOKEN_FACTORS[:N].tolist()
    return (int(GROUP_FACTOR), int(FINAL_FACTOR), *factors)


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
    at = context_ptr + row[:, None] * N + offs_n
    return tl.load(at, mask=mask[:, None] & (offs_n < N), other=-1)


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
    found,  # [B, O]: whether there is an entry
    group,  # [B] int64
    tokens,  # [B, O, BLOCK_N] int32
    entry_group_ptr,  # [C] int64
    entry_tokens_ptr,  # [C, N] int32
    N: tl.constexpr,
):
    """[B, O] bool: True if the entry holds this context, not another with the same hash."""
    offs_n = tl.arange(0, tokens.shape[2])[None, None, :]
    at = entry_tokens_ptr + entry[:, :, None].to(tl.int64) * N + offs_n
    # [B, O], [B, O, BLOCK_N]: neither load waits for the other
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
    """[B, O] int32: entry of each context, -1 if it is absent."""
    entry, found = probe_entries(code, mask, entry_hash_ptr, buckets, WAYS)
    held = holds_context(entry, found, group, tokens, entry_group_ptr, entry_tokens_ptr, N)
    return tl.where(held, entry, -1)
