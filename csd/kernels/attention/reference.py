"""Reference of the tree attention in plain PyTorch, group by group, and the positions of its keys.

    s(m, t) = cap(scale * q[m, h] . k[t, h // (H / K)]),   cap(x) = softcap * tanh(x / softcap)
    out[m, h] = sum of w(m, t) v[t, h // (H / K)] over the keys t that row m sees, where
    w(m, t) = exp(s(m, t)) / (sum over these of exp(s(m, .)) + exp(sink[h]))

A row attends to the keys of P(m), C(m) and N(m) (`csd/kernels/attention/`) that are fewer than
`window` positions before it and in its own chunk: position // chunk equals the row's. The position
of a key is its index in its sample's sequence: t for a prompt's token t, P + j for a slot's
committed token j with P the prompt's tokens, and P + C + depth for a node with C the slot's
committed tokens.

`plan_reference` reads the step's layout on the host, once for all layers. A group's T slots are
laid out side by side, each padded to r rows, the most nodes of a slot, and to the committed tokens
of the longest slot. Sums of a row are added in an order that depends on the step's other rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from csd.state.kv_cache import PAGE


@dataclass
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

    def __post_init__(self) -> None:
        # no field: those who compare an operation's arguments before and after it compare fields
        self._visible: dict[tuple, torch.Tensor] = {}

    def visible(self, window: int | None, chunk: int | None) -> torch.Tensor:
        """[T, r, n] bool: the row attends to the key."""
        key = window, chunk
        if key not in self._visible:
            row, key_position = self.position[:, :, None], self.key_position[:, None]
            self._visible[key] = self.on_path & in_reach(row, key_position, window, chunk)
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


def plan_reference(
    heads: int | None = None,
    kv_heads: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    *,
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
    """Returns rows and keys of each group that has rows; they depend on the layout alone."""
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
        key_position = torch.cat((torch.arange(P), P + committed)).expand(len(slots), -1)
        absent = committed >= old[:, None]
        whole = torch.ones(len(slots), r, P, dtype=torch.bool)
        groups.append(
            PlacedGroup(
                row.to(device),
                there.to(device),
                _places_of_rows(prompt_pages[g : g + 1].cpu(), P)[0].to(device),
                _places_of_rows(slot_pages[slots], C).to(device),
                absent.to(device),
                position.to(device),
                torch.cat((key_position, position), 1).to(device),
                torch.cat((whole, ~absent[:, None].expand(-1, r, -1), above), -1).to(device),
            )
        )
    return groups


def _places_of_rows(pages: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count]: places, among all pages' tokens, of the first tokens of page lists [T, pages]."""
    position = torch.arange(count)
    # a list that is shorter than another's ends with -1, and no row attends there
    ids = pages.long().clamp(min=0)[:, position // PAGE]
    return ids * PAGE + position % PAGE


def without_autocast(function: Callable) -> Callable:
    """Wraps a function to run without autocast, which would round its products."""

    @wraps(function)
    def call(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kind = q.device.type
        if not torch.is_autocast_enabled(kind):
            return function(q, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(q, *args, **kwargs)

    return call


class Properties(NamedTuple):
    """Properties of one attention call: its sizes, and its rules for scores."""

    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None


@without_autocast
def tree_attention_ref(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    *,
    scale: float,
    work: list[PlacedGroup] | None = None,
    out: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
    **layout: Any,
) -> torch.Tensor:
    """Returns [M, H, Dv], computed in at least float32. Rows of no slot give zeros.

    layout: the fields of a `TreeLayout`. work: the layout's `plan_reference`, made if None.
    """
    K, Dv = node_k.shape[1], node_v.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:2], Dv) if out is None else out
    out.zero_()
    k_tokens, v_tokens = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    for group in plan_reference(**layout) if work is None else work:
        # [T, r, K, H / K, D]
        rows = q[group.row].to(dtype).unflatten(2, (K, -1)) * scale
        prompt_k, prompt_v = (x[group.prompt].to(dtype) for x in (k_tokens, v_tokens))
        # [T, C + r, K, ..]
        own_k = torch.cat((k_tokens[group.committed], node_k[group.row]), 1).to(dtype)
        # unwritten memory may be NaN, and a weight of zero does not hide it
        old_v = v_tokens[group.committed].masked_fill(group.absent[..., None, None], 0)
        own_v = torch.cat((old_v, node_v[group.row]), 1).to(dtype)
        score = torch.cat(
            (
                torch.einsum("trkgd,pkd->tkgrp", rows, prompt_k),
                torch.einsum("trkgd,tnkd->tkgrn", rows, own_k),
            ),
            -1,
        )
        visible = group.visible(window, chunk)[:, None, None]
        weight = weights(score, visible, softcap, sinks)
        prompt, own = weight.split((prompt_k.shape[0], own_k.shape[1]), -1)
        result = torch.einsum("tkgrp,pkd->trkgd", prompt, prompt_v)
        result += torch.einsum("tkgrn,tnkd->trkgd", own, own_v)
        out[group.row[group.there]] = result.flatten(2, 3)[group.there].to(q.dtype)
    return out


def weights(
    score: torch.Tensor,  # [.., K, H / K, r, n]
    visible: torch.Tensor,  # bool, broadcast to it
    softcap: float | None,
    sinks: torch.Tensor | None,  # [H]
) -> torch.Tensor:
    """Weights of the keys; a row without visible keys has NaN, or zeros if there are sinks."""
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return score.softmax(-1)
    sink = sinks.to(score.dtype).view(*score.shape[-4:-2], 1, 1)
    return torch.cat((score, sink.expand(*score.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
