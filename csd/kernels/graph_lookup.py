"""Find contexts in the consensus graph.

The context of order n of a row is its group and its last n tokens t_1 (the latest) .. t_n. With
odd 64-bit constants A_0 .. A_N and arithmetic modulo 2^64:

    z = group A_0 + sum over i = 1 .. n of (t_i + 1) A_i
    z = (z ^ (z >> 32)) B,    hash = z ^ (z >> 29)            (logical shifts)

Its bucket is hash mod buckets. The first of the bucket's entries with this hash is the context's
if group and tokens agree; if they do not, or no entry has the hash, the context is absent.
"""

from functools import lru_cache

import torch

from csd.kernels.noise import _splitmix64

MAX_ORDER = 16


def _odd(i: int) -> int:
    x = _splitmix64(i) | 1
    return x - (1 << 64) if x >= 1 << 63 else x


GROUP_FACTOR = _odd(0)
TOKEN_FACTORS = tuple(_odd(i) for i in range(1, MAX_ORDER + 1))
FINAL_FACTOR = _odd(MAX_ORDER + 1)


@lru_cache
def _constants(orders: tuple[int, ...], N: int, device) -> tuple[torch.Tensor, ...]:
    """Factors [N], where each order's hash is [O], and its tokens [O, N] bool."""
    factors = torch.tensor(TOKEN_FACTORS[:N], device=device)
    last = torch.tensor(orders, device=device) - 1
    return factors, last, torch.arange(N, device=device) <= last[:, None]


def graph_lookup_ref(
    table,
    group_key: torch.Tensor,  # [R] int64, -1: the row has no contexts
    context: torch.Tensor,  # [R, N] int32, latest first, -1 before the start
    orders: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contexts of each row and where they are; O = len(orders).

    Returns hash [R, O] int64, tokens [R, O, N] int32 (-1 beyond the order) and entry [R, O] int64,
    -1 when the context is absent and -2 when the row has too few tokens for the order.
    """
    factors, last, inside = _constants(orders, context.shape[1], context.device)
    # [R, N], then [R, O]
    z = ((context + 1) * factors).cumsum(1)
    z = z.index_select(1, last).add_((group_key * GROUP_FACTOR)[:, None])
    z = (z ^ ((z >> 32) & 0xFFFFFFFF)).mul_(FINAL_FACTOR)
    code = z ^ ((z >> 29) & 0x7FFFFFFFF)
    # [R, O, N]
    tokens = torch.where(inside, context[:, None, :], -1)
    bucket = code & (table.buckets - 1)
    # [R, O, ways]
    same = table.entry_hash.view(-1, table.ways)[bucket] == code[:, :, None]
    found, way = same.max(2)
    entry = way.add_(bucket, alpha=table.ways)
    found &= table.entry_group[entry] == group_key[:, None]
    found &= (table.entry_tokens[entry] == tokens).all(2)
    exists = (context.index_select(1, last) >= 0) & (group_key >= 0)[:, None]
    entry = torch.where(found, entry, -1)
    return code, tokens, torch.where(exists, entry, -2)
