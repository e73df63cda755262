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

from csd.kernels.common.noise import splitmix64
from csd.state.context_table import Table
from csd.state.record import View

# fields that a lookup reads
ENTRIES = View(
    Table, "entry_group entry_hash entry_tokens entry_total succ_token succ_weight succ_source"
)
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
    equal = table.entry_hash.take(entry) == code
    equal &= table.entry_group.take(entry) == group_key
    equal &= (table.entry_tokens.take(entry, 0) == tokens).all(1)
    return np.where(equal, entry, -1)


def hash_factors(N: int) -> tuple[int, ...]:
    """Constant HASH of the kernels: group factor, final factor, factors of up to N tokens."""
    factors = TOKEN_FACTORS[:N].tolist()
    return (int(GROUP_FACTOR), int(FINAL_FACTOR), *factors)
