"""Draft trees on the host, as lists, and their pool."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from csd.state.pool import COST_ONE, MAX_CHILDREN, Pool
from csd.state.pool_builder import Nodes, pool_of
from csd.state.slots import Slots


@dataclass(slots=True)
class HostTree:
    """Draft tree of one sample: at most `nodes` nodes, at most `depth` deep, without duplicates."""

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
        """Return the child of `parent` (-1: the root) with `token`, new or old; -1 without room."""
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
    """A node of a slot's tree, without the fields that follow from its place."""

    token: int
    parent: int  # index in the slot's list, -1 for a root's child
    depth: int
    cost: int
    source: int


def pool_of_rows(trees: Mapping[int, Sequence[Row]], slots: Slots, rows: int) -> Pool:
    """Make the pool of the live slots' nodes.

    trees: by slot, without roots; parents first, at most 63 per slot. All must fit into `rows`.
    """
    columns: list[tuple] = []
    for s, tree in trees.items():
        base = len(columns)
        columns += [
            (n.cost, n.token, s, n.depth, n.parent + base if n.parent >= 0 else -1, n.source)
            for n in tree
        ]
    nodes = Nodes(*torch.tensor(columns, dtype=torch.int64).reshape(-1, len(Nodes._fields)).T)
    return pool_of(slots, rows, nodes)


def pool_of_trees(trees: dict[int, HostTree], slots: Slots, rows: int) -> Pool:
    """Make the pool of the live slots' trees, likeliest nodes first; all must fit into `rows`."""
    return pool_of_rows({s: _ranked(tree) for s, tree in trees.items()}, slots, rows)


def _ranked(tree: HostTree) -> list[Row]:
    # stable, and a child is never likelier than its parent
    ranked = sorted(range(len(tree.token)), key=lambda n: -tree.probability[n])
    position = {-1: -1} | {n: j for j, n in enumerate(ranked)}
    cost = [round(-math.log2(max(p, 2.0**-16)) * COST_ONE) for p in tree.probability]
    return [
        Row(tree.token[n], position[tree.parent[n]], tree.level[n], cost[n], tree.source[n])
        for n in ranked
    ]
