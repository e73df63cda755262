"""The node pool: every draft tree of a step in one ragged list of at most M rows.

Rows are ordered by group, then slot; within a slot by falling path probability, so a parent
always precedes its children and any prefix of a slot's rows is a tree. A slot's first row is its
root: the last committed token, whose keys and values are not in the cache yet. Padding rows come
last, with slot -1.
"""

from dataclasses import dataclass, fields

import torch

MAX_DEPTH = 16
MAX_CHILDREN = 8
MAX_NODES = 64

# where a drafted token was seen; the root was not drafted
ROOT, OWN, SIBLING, PROMPT = 0, 1, 2, 3


@dataclass(slots=True)
class Pool:
    """One step's draft trees. M rows, S slots, G groups, N the longest context of the graph."""

    token: torch.Tensor  # [M] int32, -1 in padding
    parent: torch.Tensor  # [M] int32, pool row of the parent, -1 for roots and padding
    slot: torch.Tensor  # [M] int32, -1 in padding
    depth: torch.Tensor  # [M] int32, 0 for roots
    position: torch.Tensor  # [M] int32, place in the sample's sequence, prompt included
    ancestors: torch.Tensor  # [M] int64, bit j: the slot's node j is this node or above it
    score: torch.Tensor  # [M] int32, -log2(estimated path probability) * 2^16, 0 for roots
    source: torch.Tensor  # [M] int32, ROOT, OWN, SIBLING or PROMPT
    context: torch.Tensor  # [M, N] int32, the node's token and those before it, latest first
    slot_start: torch.Tensor  # [S] int32, first row of the slot
    slot_nodes: torch.Tensor  # [S] int32, rows of the slot, 0 when it is not live
    group_start: torch.Tensor  # [G + 1] int32, row ranges of the groups

    @classmethod
    def empty(cls, rows: int, slots: int, groups: int, context: int, device="cpu") -> "Pool":
        """A pool of padding rows only."""

        def full(shape, value, dtype=torch.int32):
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            token=full((rows,), -1),
            parent=full((rows,), -1),
            slot=full((rows,), -1),
            depth=full((rows,), 0),
            position=full((rows,), 0),
            ancestors=full((rows,), 0, torch.int64),
            score=full((rows,), 0),
            source=full((rows,), ROOT),
            context=full((rows, context), -1),
            slot_start=full((slots,), 0),
            slot_nodes=full((slots,), 0),
            group_start=full((groups + 1,), 0),
        )

    @property
    def rows(self) -> int:
        return self.token.shape[0]

    def clone(self) -> "Pool":
        return Pool(**{f.name: getattr(self, f.name).clone() for f in fields(self)})
