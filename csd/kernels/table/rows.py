"""Rows that `observe` writes and `graph_insert` reads, and views of what else they take."""

from typing import NamedTuple

import torch

from csd.state.context_table import Table
from csd.state.pool import Pool
from csd.state.record import View, allocate, named, tensor
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

# successors of a row: the target's top 8 and the drawn token
SUCCESSORS = TOP + 1

# most slots that update the context of their whole group in one step
GROUP_SLOTS = 16


@named
class Observed(NamedTuple):
    """R rows with U successors each, after contexts of N tokens; a step's have U = 9."""

    group_key: torch.Tensor = tensor("R", torch.int64)  # -1: nothing to insert
    context: torch.Tensor = tensor("R N")  # latest first, -1 before the start
    succ_token: torch.Tensor = tensor("R U")  # -1 is none
    succ_weight: torch.Tensor = tensor("R U")  # 0 is none
    row_total: torch.Tensor = tensor("R")  # at least the row's sum of weights
    source_bit: torch.Tensor = tensor("R")  # the sample's


OBSERVED = View(Observed)
# fields that an observation reads
POOL = View(Pool, "slot depth context")
SLOTS = View(Slots, "group sample group_key step")
VERDICT = View(Verdict, "sample top_token top_prob accept_row")
# fields that an insertion reads and writes
TABLE = View(
    Table,
    writes="entry_group entry_hash entry_tokens entry_total entry_stamp succ_token succ_weight "
    "succ_source step dropped",
)


def observed_rows(pool: Pool, slots: Slots) -> Observed:
    """Allocates the rows that a kernel writes, uninitialized."""
    M, N = pool.context.shape
    sizes = {"R": M + slots.group.shape[0], "N": N, "U": SUCCESSORS}
    return Observed(**allocate(Observed, sizes, pool.context.device))
