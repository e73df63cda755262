"""What the exact attention on a CPU must know of a step on the host, worked out once a step.

A row's keys are its prompt's tokens, then what its sample generated: the slot's committed tokens
and the nodes on the row's path, in order of position. Of the generated ones the last TAIL are the
row's **tail**, read one by one whether they are committed or nodes; those before are its **body**.
A node is at most MAX_DEPTH deep, so the body is committed whatever the step drafted.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from csd.kernels.tree_attention.reference import token_places
from csd.state.kv_cache import PAGE
from csd.state.pool import MAX_DEPTH

# a row, the nodes above it down to its root, and what stands there when they are committed
TAIL = MAX_DEPTH + 1


@dataclass(slots=True)
class HostGroup:
    """A group's rows of the pool, and where its prompt's tokens are."""

    first: int
    last: int
    tokens: slice | torch.Tensor
    count: int


@dataclass(slots=True)
class HostTail:
    """The last keys of each row, T of them, those that are not there first."""

    token: np.ndarray  # [R, T] place in the pages, 0 where the key is a node's
    node_row: np.ndarray  # [n] rows of the pool whose keys stand in tails
    node_at: np.ndarray  # [n] and where, in [R * T]
    hidden: torch.Tensor | None  # [R, 1, T] float32, -inf where there is none; None without such


@dataclass(slots=True)
class HostBody:
    """Slots with about as many rows, padded to the same number of rows and pages."""

    row: torch.Tensor  # [B * P] int64, the row at each place, any row in padding
    token: np.ndarray  # [B, W] place in the pages, a token of some body where there is none
    hidden: torch.Tensor  # [B, P, 1, W] float32, -inf where there is none, else 0
    width: int  # W, whole pages


@dataclass(slots=True)
class HostWork:
    """All of a step. `kept` is for what attention makes of it once and for its scratch."""

    rows: int  # R, those of slots
    groups: list[HostGroup]
    tail: HostTail
    bodies: list[HostBody]
    place: torch.Tensor | None  # [R] int64, of each row in the bodies' places, one after another
    kept: dict[Any, Any] = field(default_factory=dict)


def exact_work(
    prompt_pages: torch.Tensor,
    prompt_len: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    ancestors: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
) -> HostWork:
    """Arguments as of `tree_attention_exact`, whose every layer uses the result."""
    bounds, prompt_lens = group_start.tolist(), prompt_len.tolist()
    groups = [
        HostGroup(first, last, token_places(prompt_pages[g], prompt_lens[g]), prompt_lens[g])
        for g, (first, last) in enumerate(pairwise(bounds))
        if first < last
    ]
    rows = bounds[-1]
    slots, start, lens = (x.numpy(force=True) for x in (slot[:rows], slot_start, slot_len))
    pages, words = slot_pages.numpy(force=True), ancestors[:rows].numpy(force=True)
    # [R, 64]
    on_path = (words[:, None] >> np.arange(64)) & 1
    depth = on_path.sum(1)
    committed = lens[slots].astype(np.int64)
    tail = _tail(on_path, depth, committed, pages[slots], start[slots])
    # generated keys before the tail
    before = np.minimum(committed + depth - tail.token.shape[1], committed).clip(0)
    bodies, place = _bodies(before, slots, start, slot_nodes.numpy(force=True), pages)
    return HostWork(rows, groups, tail, bodies, place)


def _tail(
    on_path: np.ndarray,  # [R, 64]
    depth: np.ndarray,  # [R] nodes on the path, the row's own included
    committed: np.ndarray,  # [R]
    pages: np.ndarray,  # [R, SP]
    start: np.ndarray,  # [R]
) -> HostTail:
    width = max(TAIL, int(depth.max(initial=0)))
    # [R, T], place among the generated keys
    j = (committed + depth)[:, None] + np.arange(-width, 0)
    node = j >= committed[:, None]
    old = ~node & (j >= 0)
    at = np.where(old, j, 0)
    token = np.where(old, np.take_along_axis(pages, at // PAGE, 1) * np.int64(PAGE) + at % PAGE, 0)
    # parents come first, so a path's nodes are in the order of their bits; they end a row's tail
    row, bit = np.nonzero(on_path)
    node_at = np.flatnonzero(node)
    node_row = start[row] + bit
    missing = np.flatnonzero(j < 0)
    if missing.size:
        # some key that is there: what is hidden must be finite
        node_row = np.concatenate((node_row, missing // width))
        node_at = np.concatenate((node_at, missing))
    hidden = _bias(j < 0)[:, None] if missing.size else None
    return HostTail(token, node_row, node_at, hidden)


def _bias(hidden: np.ndarray) -> torch.Tensor:
    # adding takes a fraction of the time that masking does
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))


def _bodies(
    before: np.ndarray,  # [R] keys of each row's body
    slots: np.ndarray,  # [R]
    start: np.ndarray,  # [S]
    nodes: np.ndarray,  # [S]
    pages: np.ndarray,  # [S, SP]
) -> tuple[list[HostBody], torch.Tensor | None]:
    """Slots with a body, those with a similar number of rows together."""
    having = np.unique(slots[before > 0])
    if not having.size:
        return [], None
    bodies, place, at = [], np.full(slots.shape[0], -1, np.int64), 0
    some = int(pages[having[0], 0]) * PAGE
    for low, high in ((0, 4), (4, 16), (16, 64)):
        some_slots = having[(nodes[having] > low) & (nodes[having] <= high)]
        if not some_slots.size:
            continue
        count = nodes[some_slots]
        P = int(count.max())
        i = np.arange(P)
        # [B, P]
        there = i < count[:, None]
        row = np.where(there, start[some_slots][:, None] + i, start[some_slots][:, None])
        keys = np.where(there, before[row], 0)
        width = -(-int(keys.max()) // PAGE) * PAGE
        key = np.arange(width)
        # [B, W]
        ids = pages[some_slots, : width // PAGE].repeat(PAGE, 1).astype(np.int64)
        token = np.where(key < keys.max(1)[:, None], ids * PAGE + key % PAGE, some)
        hidden = _bias(key >= keys[:, :, None])[:, :, None]
        place[row[there]] = at + np.flatnonzero(there)
        bodies.append(HostBody(torch.from_numpy(row.ravel()), token, hidden, width))
        at += row.size
    # rows without a body share a place behind all
    return bodies, torch.from_numpy(np.where(place < 0, at, place))
