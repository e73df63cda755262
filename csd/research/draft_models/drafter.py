"""Drafter of a drafting network: one tree per slot, alone or in one pool with the graph's nodes.

A tree grows by levels. The network reads the `k` likeliest paths of each slot's level in one
forward pass over all slots, and each path adds its `k` likeliest children; after `depth` levels the
likeliest nodes of all slots enter the pool, up to the budget. This is EAGLE-2's dynamic tree
(arXiv 2406.16858) over all samples at once, with its confidences calibrated by measured acceptance
(`distributions.py`), which also ranks the network's nodes against the graph's. `k = 1` drafts
chains.

The host reads the device while drafting, so the steps are not captured. A network alone on a GPU
uses `device_drafter.py` instead, which needs no such reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from csd.graph.consensus import ConsensusGraph
from csd.graph.drafter import Drafter
from csd.graph.history import PastSample
from csd.graph.host_tree import HostTree, pool_of_trees
from csd.kernels.backends import for_dtype
from csd.kernels.draft import DraftNoise
from csd.kernels.ops import Ops
from csd.research.draft_models.cache import DraftCache, DraftNetwork, Scratch
from csd.research.draft_models.distributions import (
    BOTH,
    GRAPH,
    MODEL,
    Levels,
    Reliability,
    distributions,
    expected,
)
from csd.research.draft_models.prefill import DraftPrefill
from csd.research.draft_models.slots import DraftSlots, take
from csd.state import pool
from csd.state.kv_cache import KVCache
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool, path_probability
from csd.state.pool_builder import progress_penalties, roots
from csd.state.slots import Slots
from csd.state.verdict import Verdict


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
) -> dict[int, HostTree]:
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
    selected = {s: HostTree(MAX_NODES - 1, MAX_DEPTH) for s in trees}
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


class NetworkDrafter(Drafter):
    """Base of the drafters of a network.

    k: children per node, and paths per slot that continue. depth: largest number of levels.
    temperature: of the drafts, one number or one per sequence; None: the samples' own. name: the
    network's name, in errors.
    """

    def __init__(
        self,
        net: DraftNetwork,
        ops: Ops,
        device: str | torch.device,
        *,
        k: int,
        depth: int,
        temperature: float | tuple[float, ...] | None = None,
        name: str = "the draft model",
    ):
        self.net, self.ops, self.device = net, for_dtype(ops, net.dtype), torch.device(device)
        self.k, self.depth, self.name = k, depth, name
        self.temperature: Any = temperature

    def attach(self, decoder: Any, cache: KVCache) -> None:
        own, vocab = self.net.config.vocab, decoder.config.vocab
        if own != vocab:
            raise ValueError(
                f"drafter must have the model's vocabulary: {self.name} has {own} tokens, the "
                f"model has {vocab}"
            )
        self.net.attach(decoder)

    @property
    def reads_hidden(self) -> bool:
        return self.net.wants_hidden

    def cache_bytes(self, pages: int) -> int:
        return pages * KVCache.bytes_per_page(self.net.config, self.net.dtype)


class ModelDrafter(NetworkDrafter):
    """Drafter of a network on the host; graph: a consensus graph that drafts in addition."""

    def __init__(
        self,
        net: DraftNetwork,
        ops: Ops,
        device: str | torch.device,
        *,
        graph: ConsensusGraph | None = None,
        **settings: Any,
    ):
        super().__init__(net, ops, device, **settings)
        self.graph, self.context = graph, graph.context if graph else 1
        self.prefill = DraftPrefill(net, self.device)
        self.start_call()
        # drafts of the running step
        self.trees: dict[int, SlotTree] = {}
        self.scratch: Scratch | None = None
        self.drawn = False

    def suits(self, tokens: int, history: bool) -> bool:
        return self.graph is None or self.graph.suits(tokens, history)

    @property
    def dropped(self) -> torch.Tensor | None:
        return self.graph.dropped if self.graph else None

    def attach(self, decoder: Any, cache: KVCache) -> None:
        super().attach(decoder, cache)
        self.prefill.cache = DraftCache(self.net, self.ops, cache, self.device)

    def start_call(self) -> None:
        self.net.start_call()
        self.reliability, self.levels = Reliability(), Levels()

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Read the prompt up to the target's position."""
        self.prefill.read_prompt(group_key, prompt, read, slots)
        if self.graph is None:
            return read
        return self.graph.observe_prompt(group_key, prompt, observed, read, slots)

    def max_history(self, history: Sequence[PastSample], groups: int) -> int | None:
        return self.graph.max_history(history, groups) if self.graph else None

    def enter_history(
        self, group_key: int, prompt: list[int], history: Sequence[PastSample], slots: Slots
    ) -> Iterator[int]:
        assert self.graph is not None
        return self.graph.enter_history(group_key, prompt, history, slots)

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        self.prefill.hidden = self.net.states(hidden)

    def propose(self, slots: Slots, rows: int, noise: DraftNoise | None = None) -> Pool:
        """Draft trees of all live slots in at most `rows` rows, roots included."""
        host = DraftSlots.of(slots)
        if rows <= len(host.live):
            return roots(slots, rows)
        self.begin(host)
        self._grow(host, slots, noise)
        if self.graph is not None:
            add_pool(self.trees, self.graph.propose(slots, rows, noise))
        penalty = progress_penalties(slots).tolist()
        trees = likeliest(self.trees, rows - len(host.live), self.reliability, penalty)
        return pool_of_trees(trees, slots, rows)

    def begin(self, host: DraftSlots, drawn: bool = False) -> None:
        """Start a step with empty trees. drawn: True if their nodes will be random draws."""
        assert self.prefill.cache is not None, "attach was not called"
        self.trees = {s: SlotTree() for s in host.live}
        self.scratch, self.drawn = Scratch(self.prefill.cache, host), drawn

    def _grow(self, host: DraftSlots, slots: Slots, noise: DraftNoise | None) -> None:
        """Add the network's nodes to the trees, level by level."""
        if isinstance(self.temperature, tuple):
            raise ValueError(
                "temperature must be one number with verifier='match', got "
                f"{len(self.temperature)}: several are for sequences of draws"
            )
        hidden = self.prefill.catch_up(host, slots)
        front = [(s, -1) for s in host.live]
        stops = slots.stop_ids.tolist()
        for depth in range(1, self.depth + 1):
            indices = [i for i, (s, _) in enumerate(front) if host.room[s] >= depth]
            if not indices:
                return
            front, hidden = [front[i] for i in indices], take(hidden, indices)
            slot = [s for s, _ in front]
            dist = distributions(self.net.logits(hidden), slot, slots, self.temperature)
            position = [host.generated[s] + depth - 1 for s in slot]
            chance = expected(dist, slot, position, slots, noise)
            fresh: list[tuple[int, int, int]] = []
            for i, (s, node) in enumerate(front):
                row = self._children(s, node, dist.token[i], chance[i], stops[s])
                fresh += [(s, child, i) for child in row]
            if depth < self.depth:
                front, hidden = self._read(fresh, depth, hidden)

    def _children(
        self, s: int, node: int, token: np.ndarray, chance: np.ndarray, stops: list[int]
    ) -> list[int]:
        """Add the `k` likeliest children of a node; returns their numbers."""
        tree = self.trees[s]
        out: list[int] = []
        above = tree.nodes[node].chance if node >= 0 else 1.0
        # tokens that end the sample are never drafted
        for c in (-chance).argsort(kind="stable"):
            if len(out) == self.k or chance[c] <= 0:
                break
            if int(token[c]) not in stops:
                out.append(tree.add(node, int(token[c])))
                child = tree.nodes[out[-1]]
                child.model = float(chance[c])
                child.chance = above * self.reliability(MODEL, child.estimate)
        return out

    def _read(
        self, fresh: list[tuple[int, int, int]], depth: int, hidden: torch.Tensor
    ) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Read each slot's `k` likeliest nodes of a level.

        fresh: (slot, node, row of its parent in `hidden`). Returns the nodes read (slot, number)
        and their states, in the same order.
        """
        assert self.scratch is not None
        ranked: dict[int, list[tuple[float, int, int]]] = {}
        for s, n, above in fresh:
            ranked.setdefault(s, []).append((-self.trees[s].nodes[n].chance, n, above))
        front, parents = [], []
        for s, candidates in ranked.items():
            for _, n, above in sorted(candidates)[: min(self.k, self.scratch.room(s))]:
                front.append((s, n))
                parents.append(above)
        if not front:
            return [], hidden[:0]
        return front, self.read_nodes(front, depth, take(hidden, parents))

    def read_nodes(
        self, front: list[tuple[int, int]], depth: int, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Read nodes (slot, number) of one depth; returns their states [n, hidden].

        hidden: states of their parents, in the same order.
        """
        assert self.scratch is not None
        nodes = [self.trees[s].nodes[n] for s, n in front]
        above = [
            self.trees[s].nodes[node.parent].number if node.parent >= 0 else -1
            for (s, _), node in zip(front, nodes, strict=True)
        ]
        numbers, out = self.scratch.level(
            [s for s, _ in front], above, [node.token for node in nodes], depth, hidden
        )
        for node, number in zip(nodes, numbers, strict=True):
            node.number = number
        return out

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Commit accepted nodes and update the reliability, after the slots have advanced."""
        if self.graph is not None:
            self.graph.insert(pool, slots, verdict)
        token = pool.token.tolist()
        below: dict[int, list[int]] = {}
        for row, parent in enumerate(pool.parent.tolist()):
            if parent >= 0:
                below.setdefault(parent, []).append(token[row])
        counts, rows = verdict.accept_count.tolist(), {}
        paths = [row[:n] for row, n in zip(verdict.accept_row.tolist(), counts, strict=True)]
        for s, tree in self.trees.items():
            recent = [token[r] for r in paths[s][1:]]
            nodes = tree.path(recent)
            self._learn(tree, nodes, recent, [below.get(r, []) for r in paths[s]])
            numbers = [tree.nodes[n].number for n in nodes]
            rows[s] = numbers[: (*numbers, -1).index(-1)]
        if self.scratch is not None and not self.net.wants_hidden:
            self.scratch.keep(rows)
        self.trees, self.scratch = {}, None
        self.prefill.observe(slots, paths)

    def _learn(
        self, tree: SlotTree, nodes: list[int], recent: list[int], drafted: list[list[int]]
    ) -> None:
        """Update the reliability. nodes, recent: nodes and tokens of the accepted path.

        drafted: drafted tokens below the root, and below each row of the path.
        """
        for depth, tokens in enumerate(drafted):
            parent = nodes[depth - 1] if depth else -1
            hit = recent[depth] if depth < len(recent) else None
            if self.drawn:
                if tokens:
                    self.levels.count(depth, hit is not None)
                continue
            for token in tokens:
                node = tree.nodes[tree.children[parent + 1][token]]
                self.reliability.learn(node.kind, node.estimate, token == hit)
