"""Draft trees on the host, as lists, and their pool."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from csd.state.pool import COST_ONE, MAX_CHILDREN, ROOT, Pool, roots
from csd.state.slots import Slots


@dataclass(slots=True)
class Tree:
    """Draft of one sample: at most `nodes` nodes of depth at most `depth`, without duplicates."""

    nodes: int
    depth: int
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)  # -1 for the root's children
    level: list[int] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)  # of the path, falling along it
    source: list[int] = field(default_factory=list)
    _children: dict = field(default_factory=dict)  # parent -> {token: node}

    @property
    def full(self) -> bool:
        return len(self.token) >= self.nodes

    def add(self, parent: int, token: int, probability: float, source: int) -> int:
        """The child of `parent` (-1 is the root) with `token`, new or not; -1 without room."""
        children = self._children.setdefault(parent, {})
        if token in children:
            return children[token]
        level = self.level[parent] + 1 if parent >= 0 else 1
        if self.full or level > self.depth or len(children) >= MAX_CHILDREN:
            return -1
        above = self.probability[parent] if parent >= 0 else 1.0
        node = children[token] = len(self.token)
        self.token.append(token)
        self.parent.append(parent)
        self.level.append(level)
        self.probability.append(min(probability, above))
        self.source.append(source)
        return node

    def chain(self, tokens: list[int], source: int, probability: float = 0.7) -> None:
        """Add a path from the root; each token is accepted with `probability`."""
        parent, path = -1, 1.0
        for token in tokens:
            path *= probability
            parent = self.add(parent, token, path, source)
            if parent < 0:
                return


class Row(NamedTuple):
    """A node of a slot's tree: the fields of `Pool` that its place does not determine."""

    token: int
    parent: int  # place in the slot's list, -1 for the root
    depth: int
    cost: int
    source: int
    context: list[int]  # latest first


def fill(pool: Pool, trees: dict[int, list[Row]]) -> None:
    """Replace the roots in a pool of roots by trees.

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


def pool_of(trees: dict[int, Tree], slots: Slots, rows: int) -> Pool:
    """Make the pool of the live slots' trees; trees: by slot, `rows` rows hold them all."""
    pool = roots(slots, rows)
    width = pool.context.shape[1]
    roots_of = zip(pool.slot.tolist(), pool.token.tolist(), pool.context.tolist(), strict=True)
    fill(pool, {s: _ranked(trees[s], token, last, width) for s, token, last in roots_of if s >= 0})
    return pool


def _ranked(tree: Tree, token: int, context: list[int], width: int) -> list[Row]:
    """The root, then the tree's nodes, likeliest first."""
    out = [Row(token, -1, 0, 0, ROOT, context)]
    # stable, and a child is never likelier than its parent
    ranked = sorted(range(len(tree.token)), key=lambda n: -tree.probability[n])
    place = {-1: 0} | {n: 1 + j for j, n in enumerate(ranked)}
    for n in ranked:
        above = place[tree.parent[n]]
        cost = round(-math.log2(max(tree.probability[n], 2.0**-16)) * COST_ONE)
        latest = [tree.token[n], *out[above].context][:width]
        out.append(Row(tree.token[n], above, tree.level[n], cost, tree.source[n], latest))
    return out
