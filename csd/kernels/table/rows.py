"""Rows of observations that `observe` writes and `graph_insert` reads."""

from typing import NamedTuple

import torch

from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP

# successors of a row: the target's top 8 and the drawn token
SUCCESSORS = TOP + 1

# most slots that update the context of their whole group in one step
GROUP_SLOTS = 16


class Observed(NamedTuple):
    """R rows with U = 9 successors each, after contexts of N tokens."""

    group_key: torch.Tensor  # [R] int64, -1: nothing to insert
    context: torch.Tensor  # [R, N] int32, latest first
    succ_token: torch.Tensor  # [R, U] int32
    succ_weight: torch.Tensor  # [R, U] int32, 0 is none
    row_total: torch.Tensor  # [R] int32
    source_bit: torch.Tensor  # [R] int32, the sample's


def _empty(M: int, S: int, N: int, device: torch.device) -> Observed:
    R = M + S

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    key = torch.empty(R, dtype=torch.int64, device=device)
    return Observed(key, ints(R, N), ints(R, SUCCESSORS), ints(R, SUCCESSORS), ints(R), ints(R))


def observed_rows(pool: Pool, slots: Slots) -> Observed:
    """Allocates the rows that a kernel writes, uninitialized."""
    M, N = pool.context.shape
    return _empty(M, slots.count, N, pool.context.device)
