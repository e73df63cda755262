"""Slots for drafting with a model: their state and order, and the attention layout of their rows.

On the host a slot has any number of rows (`DraftSlots`, `SlotRows`). In tensors of fixed shape
every live slot has the same number (`SlotOrder`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from csd.state.pool import MAX_DEPTH
from csd.state.slots import Slots


def take(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Select rows of x by indices on the host."""
    return x.index_select(0, torch.tensor(rows, dtype=torch.int64).to(x.device))


@dataclass(slots=True)
class DraftSlots:
    """Host copy of the slots' state, as lists over the slots unless noted."""

    live: list[int]  # live slots, ordered by group, then slot
    group: list[int]
    group_key: list[int]  # list over the groups
    sample: list[int]
    generated: list[int]
    room: list[int]  # largest depth of a tree

    @classmethod
    def of(cls, slots: Slots) -> "DraftSlots":
        group = slots.group.tolist()
        live = [s for s, runs in enumerate(slots.live.tolist()) if runs]
        return cls(
            live=sorted(live, key=lambda s: (group[s], s)),
            group=group,
            group_key=slots.group_key.tolist(),
            sample=slots.sample.tolist(),
            generated=slots.generated.tolist(),
            room=(slots.max_new - 1 - slots.generated).clamp(0, MAX_DEPTH).tolist(),
        )

    def owner(self, s: int) -> tuple[int, int]:
        """The sample in slot s: the key of its group, and its sample index."""
        return self.group_key[self.group[s]], self.sample[s]


@dataclass(slots=True)
class SlotRows:
    """Layout of rows of some slots: one slot after another, ordered by group."""

    slots: list[int]
    start: dict[int, int]
    count: dict[int, int]

    @classmethod
    def of(cls, slots: Iterable[int], count: dict[int, int]) -> "SlotRows":
        """Lay out count[s] rows of each slot.

        slots: ordered by group, then slot; slots without rows are left out.
        """
        count = {s: count[s] for s in slots if count.get(s)}
        start = dict(zip(count, accumulate(count.values(), initial=0), strict=False))
        return cls(list(count), start, count)

    @property
    def total(self) -> int:
        return sum(self.count.values())

    def tensors(self, slots: int, group: list[int], device: torch.device) -> dict:
        """int32 tensors slot [M], slot_start [S], slot_nodes [S] and group_start [G + 1]."""
        start, nodes = [0] * slots, [0] * slots
        sizes = [0] * slots  # by group
        owner: list[int] = []
        for s in self.slots:
            start[s], nodes[s] = self.start[s], self.count[s]
            owner += [s] * self.count[s]
            sizes[group[s]] += self.count[s]
        bounds = [0, *accumulate(sizes)]
        columns = dict(slot=owner, slot_start=start, slot_nodes=nodes, group_start=bounds)
        return {
            name: torch.tensor(column, dtype=torch.int32).to(device)
            for name, column in columns.items()
        }


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
            slot,
            slots.live[slot],
            slots.group[slot].clamp(min=0).long(),
            torch.searchsorted(rank[slot], every),
        )

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
