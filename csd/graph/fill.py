"""Draft trees made on the host, as lists, put into the pool of a step."""

from typing import NamedTuple

import torch

from csd.state.pool import Pool


class Row(NamedTuple):
    """A node of a slot's tree: what `Pool` has of it, but for what follows from its place."""

    token: int
    parent: int  # place in the slot's list, -1 for the root
    depth: int
    cost: int
    source: int
    context: list[int]  # latest first


def fill(pool: Pool, trees: dict[int, list[Row]]) -> None:
    """Put trees in the place of their roots, which are all that `pool` holds.

    trees: by slot, in the order of the pool's roots; parents first, at most 64 rows a slot.
    """
    position = pool.position.tolist()
    rows: list[tuple] = []
    starts: list[int] = []
    for root, (s, tree) in enumerate(trees.items()):
        base = len(rows)
        starts.append(base)
        words: list[int] = []
        for place, node in enumerate(tree):
            word = 1 << place | (words[node.parent] if node.parent >= 0 else 0)
            words.append(word)
            rows.append((
                node.token,
                base + node.parent if node.parent >= 0 else -1,
                s,
                node.depth,
                position[root] + node.depth,
                # the 64th node's bit is the sign
                word - (1 << 64) if word >> 63 else word,
                node.cost,
                node.source,
                node.context,
            ))  # fmt: skip
    if not rows:
        return
    fields = (
        pool.token, pool.parent, pool.slot, pool.depth, pool.position, pool.ancestors,
        pool.cost, pool.source, pool.context,
    )  # fmt: skip
    for tensor, column in zip(fields, zip(*rows, strict=True), strict=True):
        tensor[: len(rows)] = torch.tensor(column, dtype=tensor.dtype)
    at = torch.tensor(list(trees), device=pool.slot_start.device)
    nodes = [len(tree) for tree in trees.values()]
    pool.slot_start[at] = torch.tensor(starts, dtype=torch.int32).to(at.device)
    pool.slot_nodes[at] = torch.tensor(nodes, dtype=torch.int32).to(at.device)
    bounds = [*starts, len(rows)]
    first = [bounds[i] for i in pool.group_start.tolist()]
    pool.group_start.copy_(torch.tensor(first, dtype=torch.int32))
