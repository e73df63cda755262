"""A trained draft head beside the graph: both sets of candidates enter one pool.

A head, as EAGLE (arXiv 2401.15077, 2406.16858) trains them, guesses what follows a text from the
target's hidden states. csd trains none. A `Head` is yours; this drafter asks it level by level for
the likeliest continuations, merges them with what the graph drafts, and keeps the nodes of largest
path probability over all samples. A node that both draft has the larger of both probabilities.

    csd.generate(model, prompt, drafter=lambda ops, device: HeadDrafter(MyHead(), ops, device))
"""

from typing import Any, Protocol

import torch

from csd.graph.consensus import ConsensusGraph
from csd.graph.drafter import Drafter
from csd.graph.rivals.host_drafter import Tree, pool_of
from csd.kernels.draft_tree import DraftNoise
from csd.kernels.ops import Ops
from csd.state.pool import MAX_DEPTH, MAX_NODES, SIBLING, Pool, path_probability
from csd.state.slots import Slots
from csd.state.verdict import Verdict


class Head(Protocol):
    """What a draft head provides. All calls are between two steps' forward passes."""

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        """A new prompt; its samples start at its last token."""

    def expand(self, slot: torch.Tensor, path: list[list[int]]) -> tuple[list, list]:
        """Tokens and probabilities of what may follow each of F drafted paths.

        slot: [F] int64. path: F lists of drafted tokens behind the slot's last committed token.
        Returns F lists of tokens and F lists of their probabilities, given the path.
        """

    def insert(
        self, hidden: torch.Tensor | None, pool: Pool, slots: Slots, verdict: Verdict
    ) -> None:
        """A step is done. hidden: [M, D] the target's last layer at the pool's rows, or None."""


class HeadDrafter(Drafter):
    """head: a `Head`. width: paths of a sample expanded in each level; depth: levels."""

    def __init__(
        self,
        head: Head,
        ops: Ops,
        device: str | torch.device,
        width: int = 4,
        depth: int = MAX_DEPTH,
        graph: Any = None,
    ):
        self.head, self.width, self.depth = head, width, min(depth, MAX_DEPTH)
        self.graph = ConsensusGraph(ops, device) if graph is None else graph
        self.context = self.graph.context
        self._hidden: torch.Tensor | None = None

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        self.graph.start(group_key, prompt, slots)
        self.head.start(group_key, prompt, slots)

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        self.graph.insert(pool, slots, verdict)
        self.head.insert(self._hidden, pool, slots, verdict)
        self._hidden = None

    def propose(self, slots: Slots, rows: int, noise: DraftNoise | None = None) -> Pool:
        live = slots.live.nonzero()[:, 0].tolist()
        if rows <= len(live):
            return self.graph.propose(slots, rows, noise)
        room = (slots.max_new - 1 - slots.generated).tolist()
        trees = {s: Tree(1 << 30, min(room[s], self.depth)) for s in live}
        self._grow(trees)
        # what the graph drafts is never too deep
        for tree in trees.values():
            tree.depth = MAX_DEPTH
        _merge(trees, self.graph.propose(slots, rows, noise))
        return pool_of(_cut(trees, rows - len(live)), slots, rows)

    def _grow(self, trees: dict[int, Tree]) -> None:
        """The head's candidates, level by level."""
        front: list[tuple[int, int, list[int], float]] = [
            (s, -1, [], 1.0) for s, tree in trees.items() if tree.depth > 0
        ]
        while front:
            slot = torch.tensor([s for s, *_ in front])
            tokens, chances = self.head.expand(slot, [path for _, _, path, _ in front])
            found: dict[int, list] = {}
            for (s, parent, path, above), after, chance in zip(
                front, tokens, chances, strict=True
            ):
                for token, p in zip(after, chance, strict=True):
                    node = trees[s].add(parent, token, above * p, SIBLING)
                    if node >= 0 and trees[s].level[node] < trees[s].depth:
                        found.setdefault(s, []).append((s, node, [*path, token], above * p))
            front = []
            for paths in found.values():
                front += sorted(paths, key=lambda p: -p[3])[: self.width]


def _merge(trees: dict[int, Tree], pool: Pool) -> None:
    """Add a pool's nodes to the trees; a node in both keeps its larger probability."""
    fields = (pool.slot, pool.parent, pool.token, pool.cost, pool.source)
    node = []
    for slot, parent, token, cost, source in zip(*(f.tolist() for f in fields), strict=True):
        if slot < 0 or parent < 0:
            node.append(-1)
            continue
        tree, chance = trees[slot], path_probability(cost)
        if parent >= 0 and node[parent] == _LOST:
            node.append(_LOST)
            continue
        place = tree.add(node[parent], token, chance, source)
        node.append(place if place >= 0 else _LOST)
        if place >= 0:
            above = tree.probability[tree.parent[place]] if tree.parent[place] >= 0 else 1.0
            tree.probability[place] = max(tree.probability[place], min(chance, above))


# a node that had no room
_LOST = -2


def _cut(trees: dict[int, Tree], budget: int) -> dict[int, Tree]:
    """The likeliest nodes over all trees, at most MAX_NODES - 1 of one."""
    ranked = sorted(
        (-tree.probability[n], s, n) for s, tree in trees.items() for n in range(len(tree.token))
    )
    kept = {s: Tree(MAX_NODES - 1, MAX_DEPTH) for s in trees}
    place: dict[tuple[int, int], int] = {}
    for chance, s, n in ranked:
        if budget <= 0:
            break
        tree, parent = trees[s], trees[s].parent[n]
        above = place.get((s, parent), -1)
        if parent >= 0 and above < 0:
            continue
        place[s, n] = kept[s].add(above, tree.token[n], -chance, tree.source[n])
        budget -= place[s, n] >= 0
    return kept
