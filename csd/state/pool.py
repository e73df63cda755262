"""The node pool: every draft tree of a step in one ragged list of at most M rows.

Rows are ordered by group, then slot, and within a slot by descending path probability, so a parent
always precedes its children and any prefix of a slot's rows is a tree. A slot's first row is its
root: the last committed token, whose keys and values are not in the cache yet. Padding rows come
last, with slot -1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from csd.state.record import allocate, tensor

MAX_DEPTH = 16
MAX_CHILDREN = 8
MAX_NODES = 64
# fixed point of Pool.cost: halving a path's probability adds this to it
COST_ONE = 1 << 16

# A call ends with its last sample, and a step takes nearly as long for one sample as for many. So
# while no sample waits for a slot, a node costs more for each token by which its sample is ahead of
# the shortest one: a 16th of a halving of its probability, at most four halvings.
PROGRESS_PENALTY, MAX_PROGRESS_PENALTY = COST_ONE // 16, 4 * COST_ONE
# largest penalty of the consensus graph within a group (`csd.state.context_table.GraphConfig`)
MAX_GROUP_PENALTY = 2 * COST_ONE

# source of a drafted token: where it was observed, or MODEL; ROOT: not drafted
ROOT, OWN, SIBLING, PROMPT, HISTORY, MODEL, PRIOR = range(7)


@dataclass(slots=True)
class Pool:
    """One step's draft trees. M rows, S slots, G groups, N the longest context of the graph."""

    token: torch.Tensor = tensor("M", fill=-1)  # -1 in padding
    parent: torch.Tensor = tensor("M", fill=-1)  # pool row of the parent, -1 for roots and padding
    slot: torch.Tensor = tensor("M", fill=-1)  # -1 in padding
    depth: torch.Tensor = tensor("M")  # 0 for roots
    position: torch.Tensor = tensor("M")  # place in the sample's sequence, prompt included
    # bit j: the slot's node j is this node or above it
    ancestors: torch.Tensor = tensor("M", torch.int64)
    cost: torch.Tensor = tensor("M")  # -log2(estimated path probability) * COST_ONE
    source: torch.Tensor = tensor("M", fill=ROOT)  # ROOT or where the token was observed
    # the node's token and those before it, latest first
    context: torch.Tensor = tensor("M N", fill=-1)
    slot_start: torch.Tensor = tensor("S")  # first row of the slot
    slot_nodes: torch.Tensor = tensor("S")  # rows of the slot, 0 when it is not live
    group_start: torch.Tensor = tensor("G+1")  # row ranges of the groups
    # rows of the model, if slots with equal text share them; None: every node has its own
    texts: "Texts | None" = None

    @classmethod
    def empty(
        cls,
        rows: int,
        slots: int,
        groups: int,
        context: int,
        device: str | torch.device = "cpu",
        filled: bool = True,
    ) -> "Pool":
        """Returns a pool of padding rows only, or of uninitialized memory."""
        sizes = {"M": rows, "S": slots, "G": groups, "N": context}
        return cls(**allocate(cls, sizes, device, filled=filled))

    @property
    def rows(self) -> int:
        return self.token.shape[0]

    @property
    def computed(self) -> "Pool":
        """The pool whose rows the model computes: itself, or that of the texts."""
        return self if self.texts is None else self.texts.rows


class Texts(NamedTuple):
    """Distinct texts that a step reads: the rows of the model (`csd/kernels/texts`)."""

    rows: Pool  # class trees, of R rows
    row: torch.Tensor  # [M] int32: of the rows, the one that computes each node of the pool


def model_row(pool: Pool, node: torch.Tensor) -> torch.Tensor:
    """Rows of the model that compute nodes of a pool, int64; node: int, -1 for none."""
    if pool.texts is None:
        return node.long()
    return torch.where(node >= 0, pool.texts.row[node.clamp(min=0).long()], -1).long()


def on_path(pool: Pool, rows: torch.Tensor | slice) -> torch.Tensor:
    """[R, M] bool: nodes of the pool on the paths of its `rows`, from the root to the row itself.

    False in rows of padding.
    """
    slot = pool.slot[rows, None]
    start = pool.slot_start[slot.clamp(min=0).long()]
    node = torch.arange(pool.rows, device=start.device) - start
    above = (pool.ancestors[rows, None] >> node.clamp(0, 63)) & 1
    return (slot == pool.slot) & (slot >= 0) & (above == 1)


def rooted(pool: Pool, match: torch.Tensor) -> torch.Tensor:
    """[M] bool: True for rows that are in `match` [M] together with all of their ancestors."""
    live = pool.slot >= 0
    s = pool.slot.clamp(min=0).long()
    node = torch.arange(pool.rows, device=s.device) - pool.slot_start[s]
    # bits of a slot are distinct, so their sum is their union
    bits = torch.where(match & live, torch.ones_like(pool.ancestors) << node.clamp(0, 63), 0)
    word = torch.zeros_like(pool.slot_start, dtype=torch.int64).index_add_(0, s, bits)
    return live & ((pool.ancestors & ~word[s]) == 0)


def path_probability(cost: int) -> float:
    """Path probability of a `Pool.cost`."""
    return 2.0 ** (-cost / COST_ONE)


def acceptance(cost: int) -> float:
    """Probability that a drafted node of this `Pool.cost` is accepted, or the number of samples
    that accept it, if several share the node and their probabilities add up to more than 1.

    (p / 0.8)^0.9, at most 1, with p the path probability: fitted to recorded samples
    (docs/experiments/drafting.md, allocation of a step's nodes). p includes a factor 0.8 for each
    level, of which the formula removes one, and a tenth of the others. The probability falls with
    the cost, so it orders nodes as the pool does.
    """
    probability = path_probability(cost)
    return probability if probability > 1 else min(1.25 * probability, 1.0) ** 0.9


def empty_pool(
    rows: int, slots: int, groups: int, context: int, device: str | torch.device
) -> Pool:
    """Allocates a pool; unlike `Pool.empty`, nothing is written."""
    return Pool.empty(rows, slots, groups, context, device, filled=False)
