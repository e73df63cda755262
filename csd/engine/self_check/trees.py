"""Draft trees of a few slots, for checks of operations that the drawing model does not use."""

from dataclasses import dataclass

import torch

from csd.state.device import upload


@dataclass(frozen=True, slots=True)
class Trees:
    """Nodes of all slots, slot by slot: int32, except ancestors, which are int64 bit masks."""

    slot: torch.Tensor  # [M]
    depth: torch.Tensor  # [M]
    ancestors: torch.Tensor  # [M]
    slot_start: torch.Tensor  # [S]
    slot_nodes: torch.Tensor  # [S]

    @classmethod
    def of(cls, parents: tuple[tuple[int, ...], ...], device: torch.device) -> "Trees":
        """Build the trees. parents: per slot, index in the slot of each node's parent, or -1."""
        slot: list[int] = []
        depth: list[int] = []
        words: list[int] = []
        start: list[int] = []
        for s, above in enumerate(parents):
            start.append(len(slot))
            deep: list[int] = []
            path: list[int] = []
            for i, parent in enumerate(above):
                deep.append(deep[parent] + 1 if i else 0)
                path.append(1 << i | (path[parent] if i else 0))
            slot += [s] * len(above)
            depth += deep
            words += path
        counts = [len(above) for above in parents]
        ints = (upload(torch.tensor(x, dtype=torch.int32), device)
                for x in (slot, depth, start, counts))  # fmt: skip
        slots, depths, starts, nodes = ints
        return cls(slots, depths, upload(torch.tensor(words), device), starts, nodes)
