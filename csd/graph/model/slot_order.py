"""Order of the slots in a forward pass's rows, in tensors of fixed shape."""

from dataclasses import dataclass

import torch

from csd.state.slots import Slots


@dataclass(slots=True)
class SlotOrder:
    """Slots ordered by group, then number; free slots last."""

    slot: torch.Tensor  # [S] int64
    live: torch.Tensor  # [S] bool
    group: torch.Tensor  # [S] int64, 0 for a slot without a group
    bounds: torch.Tensor  # [G + 1] int64: offsets of the groups' slots

    @classmethod
    def of(cls, slots: Slots) -> "SlotOrder":
        groups = slots.group_key.shape[0]
        rank = torch.where(slots.live, slots.group, groups)
        slot = rank.argsort(stable=True)
        every = torch.arange(groups + 1, dtype=rank.dtype, device=rank.device)
        return cls(
            slot, slots.live[slot], slots.group[slot].clamp(min=0).long(),
            torch.searchsorted(rank[slot], every),
        )  # fmt: skip

    def layout(self, each: int) -> dict[str, torch.Tensor]:
        """Attention layout of a pass with `each` rows of every live slot."""
        S = self.slot.shape[0]
        first = torch.arange(S, dtype=torch.int32, device=self.slot.device) * each
        owner = torch.where(self.live, self.slot, -1).int()
        nodes = self.live.int() * each
        return dict(
            slot=owner[:, None].expand(S, each).reshape(-1),
            slot_start=torch.zeros_like(first).index_copy_(0, self.slot, first * self.live),
            slot_nodes=torch.zeros_like(first).index_copy_(0, self.slot, nodes),
            group_start=(self.bounds * each).int(),
        )
