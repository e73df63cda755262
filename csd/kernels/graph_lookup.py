"""Find contexts in the consensus graph.

The context of order n of a row is its group and its last n tokens t_1 (the latest) .. t_n, -1
before the start. With odd 64-bit constants A_0 .. A_N and B, signed arithmetic modulo 2^64 and
arithmetic shifts:

    z = group A_0 + sum over i = 1 .. n of (t_i + 2) A_i
    z = (z ^ (z >> 32)) B,    hash = z ^ (z >> 29)

Its bucket is hash mod buckets. The first of the bucket's entries with this hash is the context's
if group and tokens agree; if they do not, or no entry has the hash, the context is absent.

The references of the graph compute in numpy, on the tensors' own memory: on the few elements of a
step an operation costs a quarter of torch's.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from csd.kernels.noise import _splitmix64

MAX_ORDER = 16


def _odd(i: int) -> int:
    x = _splitmix64(i) | 1
    return x - (1 << 64) if x >= 1 << 63 else x


GROUP_FACTOR = np.int64(_odd(0))
TOKEN_FACTORS = np.array([_odd(i) for i in range(1, MAX_ORDER + 1)])
FINAL_FACTOR = np.int64(_odd(MAX_ORDER + 1))


@lru_cache
def order_masks(orders: tuple[int, ...], N: int) -> tuple[np.ndarray, np.ndarray]:
    """Index of each order's oldest token [O], and which tokens are its [O, N]."""
    last = np.array(orders) - 1
    return last, np.arange(N) <= last[:, None]


def hash_contexts(
    group_key: np.ndarray,  # [R] int64
    context: np.ndarray,  # [R, N], latest first
    orders: tuple[int, ...],
) -> np.ndarray:
    """[R, O] int64."""
    last, _ = order_masks(orders, context.shape[1])
    z = ((context + 2) * TOKEN_FACTORS[: context.shape[1]]).cumsum(1)[:, last]
    z += (group_key * GROUP_FACTOR)[:, None]
    z = (z ^ (z >> 32)) * FINAL_FACTOR
    return z ^ (z >> 29)


def find_contexts(
    table: Any,  # csd.graph.table.Table of arrays
    group_key: np.ndarray,  # [R] int64
    context: np.ndarray,  # [R, N], latest first
    code: np.ndarray,  # [R, O] int64
    orders: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Entry [R, O] of each context, -1 when absent, and its tokens [R, O, N], -1 beyond."""
    _, inside = order_masks(orders, context.shape[1])
    tokens = np.where(inside, context[:, None, :], -1)
    bucket = code & (table.buckets - 1)
    # [R, O, ways]
    same = table.entry_hash.reshape(-1, table.ways).take(bucket, 0) == code[:, :, None]
    entry = bucket * table.ways + same.argmax(2)
    found = table.entry_hash.take(entry) == code
    found &= table.entry_group.take(entry) == group_key[:, None]
    found &= (table.entry_tokens.take(entry, 0) == tokens).all(2)
    return np.where(found, entry, -1), tokens
