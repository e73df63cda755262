"""Slots in the order of a pass's rows, in tensors of fixed shape."""

from dataclasses import dataclass

import torch

from csd.state.slots import Slots


@dataclass(slots=True)
class Order:
    """The slots by group, then number; those that are not live come last."""

    slot: torch.Tensor  # [S] int64
    live: torch.Tensor  # [S] bool
    group: torch.Tensor  # [S] int64, 0 where there is none
    bounds: torch.Tensor  # [G + 1] int64: where each group's slots begin

    @classmethod
    def of(cls, slots: Slots) -> "Order":
        groups = slots.group_key.shape[0]
        rank = torch.where(slots.live, slots.group, groups)
        slot = rank.argsort(stable=True)
        every = torch.arange(groups + 1, dtype=rank.dtype, device=rank.device)
        return cls(
            slot, slots.live[slot], slots.group[slot].clamp(min=0).long(),
            torch.searchsorted(rank[slot], every),
        )  # fmt: skip

    def layout(self, each: int) -> dict[str, torch.Tensor]:
        """Rows of a pass with `each` rows of every live slot, as attention has them."""
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
