"""Positions of the keys that a step's rows attend to, computed on the host once per step.

Windows and chunks are defined by positions. The position of a key is its index in its sample's
sequence: t for a prompt's token t, P + j for a slot's committed token j with P the prompt's tokens,
and P + C + depth for a node with C the slot's committed tokens.

A group's T slots are laid out side by side, each padded to r rows, the most nodes of a slot, and
to the committed tokens of the longest slot.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from csd.state.kv_cache import PAGE


@dataclass(slots=True)
class PlacedGroup:
    """Rows and keys of one group; n = P + C + r keys, the prompt's first, then the slot's."""

    row: torch.Tensor  # [T, r] pool rows, the slot's first in padding
    there: torch.Tensor  # [T, r] bool, not padding
    prompt: torch.Tensor  # [P] places in the pages
    committed: torch.Tensor  # [T, C] places in the pages
    absent: torch.Tensor  # [T, C] bool: the slot has fewer tokens
    position: torch.Tensor  # [T, r] positions of rows
    key_position: torch.Tensor  # [T, n]
    on_path: torch.Tensor  # [T, r, n] bool: the key is the row's or before it
    _visible: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def visible(self, window: int | None, chunk: int | None) -> torch.Tensor:
        """[T, r, n] bool: the row attends to the key."""
        key = window, chunk
        if key not in self._visible:
            row, at = self.position[:, :, None], self.key_position[:, None]
            self._visible[key] = self.on_path & in_reach(row, at, window, chunk)
        return self._visible[key]


def in_reach(
    row: torch.Tensor, key: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    """True if the key's position is at most the row's, and within its window and chunk."""
    seen = row - key >= 0
    if window is not None:
        seen &= row - key < window
    if chunk is not None:
        seen &= row // chunk == key // chunk
    return seen


def place_keys(
    prompt_pages: torch.Tensor,  # [G, PP] int32
    prompt_len: torch.Tensor,  # [G] int32
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    ancestors: torch.Tensor,  # [M] int64
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
) -> list[PlacedGroup]:
    """Returns rows and keys of each group that has rows; arguments as in `tree_attention_ref`."""
    device, bounds = ancestors.device, group_start.tolist()
    starts, nodes, prompts = slot_start.tolist(), slot_nodes.tolist(), prompt_len.tolist()
    live = sorted((start, s) for s, start in enumerate(starts) if nodes[s])
    lens, slot_pages = slot_len.cpu().long(), slot_pages.cpu()
    words, groups = ancestors.cpu(), []
    for g, (first, last) in enumerate(pairwise(bounds)):
        slots = [s for start, s in live if first <= start < last]
        if not slots:
            continue
        P, count = prompts[g], torch.tensor([nodes[s] for s in slots])
        start, old = torch.tensor([starts[s] for s in slots]), lens[slots]
        r, C = int(count.max()), int(old.max())
        # [T, r]
        there = torch.arange(r) < count[:, None]
        row = start[:, None] + torch.where(there, torch.arange(r), 0)
        above = (words[row][:, :, None] >> torch.arange(r)) & 1 == 1
        position = P + old[:, None] + above.sum(-1) - 1
        committed = torch.arange(C)
        at = torch.cat((torch.arange(P), P + committed)).expand(len(slots), -1)
        absent = committed >= old[:, None]
        whole = torch.ones(len(slots), r, P, dtype=torch.bool)
        groups.append(
            PlacedGroup(
                row.to(device),
                there.to(device),
                _places(prompt_pages[g : g + 1].cpu(), P)[0].to(device),
                _places(slot_pages[slots], C).to(device),
                absent.to(device),
                position.to(device),
                torch.cat((at, position), 1).to(device),
                torch.cat((whole, ~absent[:, None].expand(-1, r, -1), above), -1).to(device),
            )
        )
    return groups


def _places(pages: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count]: places, among all pages' tokens, of the first tokens of page lists [T, pages]."""
    at = torch.arange(count)
    # a list that is shorter than another's ends with -1, and no row attends there
    ids = pages.long().clamp(min=0)[:, at // PAGE]
    return ids * PAGE + at % PAGE
