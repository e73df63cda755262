"""Work list of `batched.py`, made on the host once per step for all layers.

A row's keys are its prompt's tokens, then what its sample generated: the slot's committed tokens
and the nodes on the row's path, in order of position. With p the position of the row among the
generated tokens, those before 64 floor(max(p - MAX_DEPTH, 0) / 64) are its **body**, the others its
**tail**. A node is at most MAX_DEPTH deep, so the body is committed whatever the step drafted; the
tail has 17 to 80 keys, or all keys if there are fewer.

A slot's rows are cut into **tiles** of equally many rows, the last one padded. A tile is a matrix
whose columns are the keys of its slot: the body, padded to the longest of the step, then the tail's
committed keys and all nodes, padded likewise.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from csd.state.kv_cache import PAGE
from csd.state.pool import MAX_DEPTH

# fewest query rows of a matrix, one per head: fewer are multiplied by other code
LEAST_ROWS = 4
# fewest columns of a product, for the same reason
LEAST_KEYS = 32
# numbers of rows of a tile, of which the cheapest for a step is used
TILE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# reading the keys of a tile takes about as long as multiplying them with this many rows; the choice
# of tile changes only the time
READING = 1.6


@dataclass(slots=True)
class Group:
    """First and last tile (exclusive) of a group, and places of its prompt's tokens."""

    first: int
    last: int
    tokens: np.ndarray  # [P] place in the pages


@dataclass(slots=True)
class BatchedWork:
    """A step's T tiles of r rows. kept: objects that the attention makes of it once."""

    rows: int  # R, those of slots; rows after them are padding
    tile_rows: int  # r
    tiles: int  # T
    groups: list[Group]
    row: np.ndarray  # [T * r] the row at each place, the tile's first row in padding
    place: np.ndarray  # [R] index of each row in `row`
    token: np.ndarray  # [T, W] place of each key in the pages; -1 - row for a node
    body: int  # columns of W that are the body's, whole pages
    hidden: np.ndarray  # [T, r, W] bool: the row does not attend to the key
    kept: dict[Any, Any] = field(default_factory=dict)


def batched_work(
    heads: int,
    kv_heads: int,
    prompt_pages: torch.Tensor,
    prompt_len: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    ancestors: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
) -> BatchedWork:
    """Returns the work list. heads, kv_heads: the model's; rest as in `tree_attention_batched`."""
    bounds, prompts = group_start.tolist(), prompt_len.tolist()
    rows = bounds[-1]
    of_row, start, nodes, lens, pages, words = (
        x.numpy(force=True)
        for x in (slot[:rows], slot_start, slot_nodes, slot_len, slot_pages, ancestors[:rows])
    )
    live = np.flatnonzero(nodes > 0)
    # in the order of their rows
    live = live[np.argsort(start[live], kind="stable")]
    r = _tile_rows(nodes[live], heads // kv_heads)
    count = -(-nodes[live] // r)
    slots = np.repeat(live, count)
    number = np.arange(slots.size) - np.repeat(count.cumsum() - count, count)
    # [T, r]
    within = number[:, None] * r + np.arange(r)
    there = within < nodes[slots][:, None]
    row = start[slots][:, None] + np.where(there, within, within[:, :1])
    place = np.empty(rows, np.int64)
    place[row[there]] = np.flatnonzero(there)

    tile_of = of_row[row[:, 0]] if rows else slots
    token, hidden, body = _keys(
        words[row], lens[tile_of].astype(np.int64), pages[tile_of], start[tile_of], nodes[tile_of]
    )
    first_tile = np.searchsorted(row[:, 0], bounds) if rows else np.zeros(len(bounds), np.int64)
    groups = [
        Group(int(first_tile[g]), int(first_tile[g + 1]), _places(prompt_pages[g], prompts[g]))
        for g, (first, last) in enumerate(pairwise(bounds))
        if first < last
    ]
    return BatchedWork(rows, r, len(slots), groups, row.ravel(), place, token, body, hidden)


def _tile_rows(nodes: np.ndarray, each: int) -> int:
    """Rows of a tile for slots with `nodes` rows; each: query heads per key-value head."""
    least = -(-LEAST_ROWS // each)
    sizes = [r for r in TILE_ROWS if r > least and r <= nodes.max(initial=0)]
    return min((least, *sizes), key=lambda r: int((-(-nodes // r)).sum()) * (r + READING))


def _keys(
    words: np.ndarray,  # [T, r] ancestor words of the rows of each tile
    committed: np.ndarray,  # [T]
    pages: np.ndarray,  # [T, SP]
    start: np.ndarray,  # [T] first row of the tile's slot
    nodes: np.ndarray,  # [T] of the tile's slot
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns token, hidden and body of `BatchedWork`."""
    if not committed.size:
        return np.zeros((0, 0), np.int64), np.ones((0, *words.shape[1:], 0), bool), 0
    # [T, r, 64]
    on_path = (words[:, :, None] >> np.arange(64)) & 1 == 1
    position = committed[:, None] + on_path.sum(2) - 1
    ends = np.maximum(position - MAX_DEPTH, 0) // PAGE * PAGE
    # a caller's path may be longer than MAX_DEPTH: its keys are then cut elsewhere, not wrongly
    ends = np.minimum(ends, committed[:, None] // PAGE * PAGE)
    first, body = ends.min(1), int(ends.max())
    # [T], keys of the tail that are committed
    old = committed - first
    width = max(LEAST_KEYS, -(-int((old + nodes).max()) // 8) * 8)

    key = np.arange(body)
    in_body = key < ends[:, :, None]
    i = np.arange(width)
    is_old = i < old[:, None]
    node = np.where(is_old, 0, i - old[:, None])
    is_node = ~is_old & (node < nodes[:, None])
    # [T, r, width]
    in_tail = is_old[:, None] & (first[:, None, None] + i >= ends[:, :, None])
    in_tail |= is_node[:, None] & np.take_along_axis(
        on_path, np.minimum(node, 63)[:, None].repeat(words.shape[1], 1), 2
    )

    some = -1 - start[:, None]
    # masked keys must be finite: a node of the slot takes their place
    body_token = np.where(key < ends.max(1)[:, None], _in_pages(pages, key[None]), some)
    at = np.where(is_old, first[:, None] + i, 0)
    old_token = _in_pages(pages, at)
    tail_token = np.where(is_old, old_token, np.where(is_node, some - node, some))
    token = np.concatenate((body_token, tail_token), 1)
    return token, ~np.concatenate((in_body, in_tail), 2), body


def _in_pages(pages: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Places of tokens `at` [T or 1, n] of page tables [T, SP]."""
    page = np.minimum(at // PAGE, pages.shape[1] - 1)
    ids = pages[:, page[0]] if at.shape[0] == 1 else np.take_along_axis(pages, page, 1)
    return ids.astype(np.int64) * PAGE + at % PAGE


def _places(pages: torch.Tensor, count: int) -> np.ndarray:
    ids = pages[: -(-count // PAGE)].numpy(force=True)
    return (ids.astype(np.int64)[:, None] * PAGE + np.arange(PAGE)).ravel()[:count]
