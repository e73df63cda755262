"""Drafted tokens of one slot in one step, and the selection of all slots' nodes for the pool."""

from dataclasses import dataclass, field

from csd.graph.host_tree import Tree
from csd.graph.model.distributions import BOTH, GRAPH, MODEL, Reliability
from csd.state import pool
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool, path_probability


@dataclass(slots=True)
class DraftNode:
    """A drafted token, with each drafter's probability of it after its parent."""

    token: int
    parent: int  # number in the slot, -1 for children of the root
    depth: int
    model: float = 0.0  # by the model; 0 if it did not draft the token
    graph: float = 0.0  # by the graph, likewise
    source: int = pool.MODEL
    number: int = -1  # index in the scratch of keys and values; -1 if the model has not read it
    chance: float = 0.0  # calibrated probability of the path

    @property
    def kind(self) -> int:
        if self.model and self.graph:
            return BOTH
        return MODEL if self.model else GRAPH

    @property
    def estimate(self) -> float:
        return min(max(self.model, self.graph), 1.0)


@dataclass(slots=True)
class SlotTree:
    """Nodes of a slot, parents before their children."""

    nodes: list[DraftNode] = field(default_factory=list)
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])  # the root's first

    def add(self, parent: int, token: int) -> int:
        """Return the number of the child of `parent` with `token`; adds it if it is new."""
        children = self.children[parent + 1]
        if token not in children:
            depth = self.nodes[parent].depth + 1 if parent >= 0 else 1
            children[token] = len(self.nodes)
            self.nodes.append(DraftNode(token, parent, depth))
            self.children.append({})
        return children[token]

    def path(self, tokens: list[int]) -> list[int]:
        """Numbers of the nodes along `tokens`, as far as they exist."""
        node, out = -1, []
        for token in tokens:
            child = self.children[node + 1].get(token)
            if child is None:
                break
            out.append(child)
            node = child
        return out


def add_pool(trees: dict[int, SlotTree], drafted: Pool) -> None:
    """Add the graph's nodes to the trees; a token's probability is its path's divided by its
    parent's."""
    columns = (drafted.slot, drafted.parent, drafted.token, drafted.cost, drafted.source)
    index: list[int] = []
    costs = drafted.cost.tolist()
    for s, parent, token, cost, source in zip(*(x.tolist() for x in columns), strict=True):
        if s < 0 or parent < 0:
            index.append(-1)
            continue
        tree = trees[s]
        index.append(tree.add(index[parent], token))
        node = tree.nodes[index[-1]]
        node.graph, node.source = path_probability(cost - costs[parent]), source


def likeliest(
    trees: dict[int, SlotTree], nodes: int, reliability: Reliability, penalty: list[int]
) -> dict[int, Tree]:
    """Select the `nodes` likeliest nodes of all trees, by calibrated probability.

    penalty: one per slot, from `csd.state.pool_builder.progress_penalties`.
    """
    weight = [path_probability(cost) for cost in penalty]
    for tree in trees.values():
        for node in tree.nodes:
            share = tree.nodes[node.parent].chance if node.parent >= 0 else 1.0
            node.chance = share * reliability(node.kind, node.estimate)
    ranked = sorted(
        (-node.chance * weight[s], s, n)
        for s, tree in trees.items()
        for n, node in enumerate(tree.nodes)
    )
    selected = {s: Tree(MAX_NODES - 1, MAX_DEPTH) for s in trees}
    index: dict[tuple[int, int], int] = {(s, -1): -1 for s in trees}
    for _, s, n in ranked:
        node = trees[s].nodes[n]
        # skip nodes whose parent was not selected
        if nodes <= 0 or (s, node.parent) not in index:
            continue
        added = selected[s].add(index[s, node.parent], node.token, node.chance, node.source)
        if added >= 0:
            index[s, n] = added
            nodes -= 1
    return selected
