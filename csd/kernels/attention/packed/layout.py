"""Rows of samples with their common prefixes once: the nodes of tries, in depth-first order.

A node is a token of a sample. Row i is on the path of every row below it, which are the rows
i .. end[i] - 1, so one integer per row is the whole mask of a causal attention:

    row i attends to row j if j <= i < end[j]

N samples of one prompt are [prompt | completion 1 | .. | completion N]: end is R for the prompt's
rows, and the end of its completion for a completion's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from csd.kernels.attention.reference import in_reach
from csd.state.record import View, named, tensor


@named
class PackedLayout(NamedTuple):
    """Row i of R rows attends to row j if j <= i < end[j]."""

    end: torch.Tensor = tensor("R")  # the first row after those below row j
    position: torch.Tensor = tensor("R")  # index in its sample's sequence


PACKED = View(PackedLayout)


def visible_rows(
    end: torch.Tensor,  # [R] int32
    position: torch.Tensor,  # [R] int32
    window: int | None,
    chunk: int | None,
    rows: slice = slice(None),
    keys: slice = slice(None),
) -> torch.Tensor:
    """[R, R] bool, or a part of it: row i attends to row j."""
    R, device = end.shape[0], end.device
    row, key = (torch.arange(*part.indices(R), device=device) for part in (rows, keys))
    path = (key <= row[:, None]) & (row[:, None] < end[keys])
    return path & in_reach(position[rows, None], position[keys], window, chunk)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of samples, on one device. R: rows."""

    token: torch.Tensor  # [R] int64
    layout: PackedLayout
    # rows[g][n]: [1 + tokens] int64, of the last token of prompt g and of those of completion n
    rows: list[list[torch.Tensor]]


def pack_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    device: torch.device | str = "cpu",
) -> PackedRows:
    """Packs the samples of G prompts; a prefix that samples of a prompt share is stored once.

    prompts: token ids of each, at least one. completions: for each prompt those of its samples,
    which may be empty. Raises ValueError for prompts without tokens or other lengths.
    """
    if len(completions) != len(prompts):
        raise ValueError(
            f"completions must be one list per prompt, got {len(completions)} for {len(prompts)}"
        )
    token: list[int] = []
    parent: list[int] = []
    child: dict[tuple[int, int], int] = {}

    def walk(node: int, tokens: Sequence[int]) -> list[int]:
        path = [node]
        for t in tokens:
            key = node, int(t)
            if key not in child:
                child[key] = len(token)
                token.append(key[1])
                parent.append(node)
            node = child[key]
            path.append(node)
        return path

    paths: list[list[list[int]]] = []
    for g, (prompt, samples) in enumerate(zip(prompts, completions, strict=True)):
        # one root per prompt
        *_, last = walk(-1 - g, prompt)
        if last < 0:
            raise ValueError(f"prompts must have at least one token each, got none in prompt {g}")
        paths.append([walk(last, tokens) for tokens in samples])
    row, end, position = _depth_first(parent)
    order = sorted(range(len(row)), key=row.__getitem__)
    columns = [[x[node] for node in order] for x in (token, end, position)]
    host = torch.tensor(columns, dtype=torch.int64)
    ids, ends, positions = host.to(device)
    rows = [[torch.tensor([row[n] for n in path], device=device) for path in of] for of in paths]
    return PackedRows(ids, PackedLayout(ends.int(), positions.int()), rows)


def _depth_first(parent: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Row, end and position of each node; a parent precedes its children."""
    size, depth, row = ([value] * len(parent) for value in (1, 0, 0))
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            size[parent[node]] += size[node]
    # the next free row below a node, and of the roots
    free, roots = [0] * len(parent), 0
    for node, above in enumerate(parent):
        if above < 0:
            row[node], roots = roots, roots + size[node]
        else:
            row[node], depth[node] = free[above], depth[above] + 1
            free[above] += size[node]
        free[node] = row[node] + 1
    return row, [first + count for first, count in zip(row, size, strict=True)], depth
