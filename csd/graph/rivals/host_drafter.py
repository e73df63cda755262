"""Drafters that live on the host: one tree of Python lists a sample, turned into a pool.

They are what others have published, for comparison. A step's spare rows are shared equally, as a
drafter that serves one request at a time would have them.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from csd.graph.drafter import Drafter
from csd.graph.fill import Row, fill
from csd.kernels.draft_tree import DraftNoise
from csd.state.pool import COST_ONE, MAX_CHILDREN, MAX_DEPTH, MAX_NODES, ROOT, Pool, roots
from csd.state.slots import Slots
from csd.state.verdict import Verdict


@dataclass(slots=True)
class Tree:
    """One sample's draft: at most `nodes` nodes of depth at most `depth`, and no duplicates."""

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
        """Add a path from the root; each token is right with `probability`."""
        parent, path = -1, 1.0
        for token in tokens:
            path *= probability
            parent = self.add(parent, token, path, source)
            if parent < 0:
                return


class HostDrafter(Drafter):
    """Base of the drafters below: it keeps groups and samples; they say what to draft.

    A group's state is what `open` returns; it is dropped when the group is no longer in flight.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Any] = {}

    def open(self, prompt: list[int]) -> Any:
        """State of a new group."""
        raise NotImplementedError

    def draft(self, group: Any, sample: int, tree: Tree) -> None:
        """Fill `tree` with what may follow what `sample` has said."""
        raise NotImplementedError

    def extend(
        self, group: Any, sample: int, tokens: list[int], probabilities: list[float]
    ) -> None:
        """`sample` has said `tokens`, which the target drew with `probabilities`."""
        raise NotImplementedError

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        """Open a new group; those that are gone are forgotten."""
        alive = set(slots.group_key.tolist()) | {group_key}
        self._groups = {key: group for key, group in self._groups.items() if key in alive}
        self._groups[group_key] = self.open(prompt)

    def propose(self, slots: Slots, rows: int, noise: DraftNoise | None = None) -> Pool:
        """Draft trees of all live slots in `rows` rows. Noise is not used."""
        key, group = slots.group_key.tolist(), slots.group.tolist()
        sample, room = slots.sample.tolist(), (slots.max_new - 1 - slots.generated).tolist()
        live = slots.live.nonzero()[:, 0].tolist()
        trees = {}
        for i, s in enumerate(live):
            spare = rows - len(live)
            nodes = spare // len(live) + (i < spare % len(live))
            tree = Tree(min(nodes, MAX_NODES - 1), min(room[s], MAX_DEPTH))
            if tree.nodes > 0 and tree.depth > 0:
                self.draft(self._groups[key[group[s]]], sample[s], tree)
            trees[s] = tree
        return pool_of(trees, slots, rows)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """The committed tokens."""
        key, group, sample = slots.group_key.tolist(), slots.group.tolist(), slots.sample.tolist()
        drawn, logprob = verdict.sample.tolist(), verdict.logprob.tolist()
        path = verdict.accept_row.tolist()
        for s, count in enumerate(verdict.accept_count.tolist()):
            if count:
                rows = path[s][:count]
                self.extend(
                    self._groups[key[group[s]]],
                    sample[s],
                    [drawn[r] for r in rows],
                    [math.exp(logprob[r]) for r in rows],
                )


def pool_of(trees: dict[int, Tree], slots: Slots, rows: int) -> Pool:
    """The pool of the live slots' roots and their trees; trees: by slot, `rows` hold them all."""
    pool = roots(slots, rows)
    width = pool.context.shape[1]
    heads = zip(pool.slot.tolist(), pool.token.tolist(), pool.context.tolist(), strict=True)
    fill(pool, {s: _ranked(trees[s], token, said, width) for s, token, said in heads if s >= 0})
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
        said = [tree.token[n], *out[above].context][:width]
        out.append(Row(tree.token[n], above, tree.level[n], cost, tree.source[n], said))
    return out
