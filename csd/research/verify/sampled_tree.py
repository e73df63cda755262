"""Draft trees of random draws from the graph, for multi-draft verifiers.

A node's children are K independent draws from the graph's blended distribution, normalised over
the stored successors, with words of the slot:

    word(key, rank K + k, position, sample, DRAFT | step << 3)        k = 0 .. K - 1

rank counts the nodes of one depth, so no two nodes of a step share a word. The step number gives
each step new words, since the graph depends on the drafts of previous ones.

Nodes are expanded in order of their own cost, by the blended probability of their path, over all
slots (ties: slot, then row). A node takes K rows: all of its draws in order, duplicates included,
or none. So neither the expansion of a node nor the pool's size depends on its draws: `budget` takes
the expected acceptance of a node before the draw. Only the first of equal draws is expanded.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from csd.graph.consensus import ConsensusGraph
from csd.graph.host_tree import Row, pool_of_rows
from csd.kernels.common.noise import DRAFT, philox_words, stepped
from csd.state.pool import COST_ONE, MAX_CHILDREN, MAX_DEPTH, MAX_NODES, ROOT, Pool
from csd.state.pool_builder import live_by_group
from csd.state.slots import Slots

_MAX_COST = 1 << 30


@dataclass(slots=True)
class Node:
    """One row of the pool."""

    token: int
    slot: int
    depth: int
    cost: int  # -log2 of the path's blended probability, times COST_ONE
    source: int
    context: list[int]  # latest first
    parent: int = -1  # number among the slot's nodes
    rank: int = 0  # among the slot's nodes of this depth
    row_cost: int = 0  # `Pool.cost`, by the row's expected acceptance
    children: list[int] = field(default_factory=list)  # numbers of its K draws, in order
    drafts: list[int] = field(default_factory=list)  # indices of its draws in `successors`
    # successors, and the noise words of the draws from them; None until looked up
    successors: Any = None  # Successors
    words: Any = None  # [K] array

    def row(self) -> Row:
        return Row(self.token, self.parent - 1, self.depth, self.row_cost, self.source)


@dataclass(slots=True)
class Drawn:
    """Proposals of a pool's rows, for rows with children."""

    nodes: list[Node]  # [rows in use], by pool row
    start: list[int]  # [S], first row of the slot


class SampledTrees:
    """Trees of draws of a step; drafter: a consensus graph."""

    def __init__(self, drafter: ConsensusGraph, draft_tree: Callable, draws: int):
        self._graph, self._draft_tree, self.draws = drafter, draft_tree, draws

    def grow(self, slots: Slots, live: int, nodes: int, choose: Callable) -> tuple[Pool, Drawn]:
        """Draw a pool of all live slots' roots and at most `nodes` draws.

        choose(costs) returns how many rows of these costs are worth verifying.
        """
        order, context = live_by_group(slots).tolist(), slots.context.tolist()
        # largest depth of each slot's tree
        limit = (slots.max_new - 1 - slots.generated).clamp(max=MAX_DEPTH).tolist()
        trees = {s: [Node(context[s][0], s, 0, 0, ROOT, context[s])] for s in order}
        ranks = {s: [1] for s in order}
        heap = [(0, s, 0) for s in order]
        waiting = [trees[s][0] for s in order]
        used, costs = 0, []
        while heap and used + self.draws <= nodes:
            _, s, number = heapq.heappop(heap)
            node, tree = trees[s][number], trees[s]
            if node.depth >= limit[s] or len(tree) + self.draws > MAX_NODES:
                continue
            if node.successors is None:
                self._look_up(waiting, slots)
                waiting = []
            if not node.successors.token:
                continue
            cost = self._row_cost(node)
            costs += [cost] * self.draws
            if choose(costs) < len(costs):
                break
            used += self.draws
            node.drafts = draw(node.successors.probs, node.words)
            for i in node.drafts:
                token = node.successors.token[i]
                child = Node(
                    token,
                    s,
                    depth=node.depth + 1,
                    cost=node.cost + node.successors.cost[i],
                    source=node.successors.source[i],
                    context=[token, *node.context[:-1]],
                    parent=number,
                    row_cost=cost,
                )
                node.children.append(len(tree))
                first = all(tree[c].token != token for c in node.children[:-1])
                tree.append(child)
                if first:
                    # a new depth starts at rank 0
                    ranks[s] += [0] * (child.depth + 1 - len(ranks[s]))
                    child.rank = ranks[s][child.depth]
                    ranks[s][child.depth] += 1
                    heapq.heappush(heap, (child.cost, s, len(tree) - 1))
                    waiting.append(child)
        drafted = {s: [node.row() for node in tree[1:]] for s, tree in trees.items()}
        pool = pool_of_rows(drafted, slots, live + nodes)
        return pool, Drawn([n for tree in trees.values() for n in tree], pool.slot_start.tolist())

    def _row_cost(self, node: Node) -> int:
        """Cost of one of the node's rows, by its expected acceptance before the draw."""
        known = node.successors
        hit = float((known.probability * (1 - (1 - known.probs) ** self.draws)).sum()) / self.draws
        return min(node.cost + round(-math.log2(hit) * COST_ONE), _MAX_COST)

    def _look_up(self, nodes: list[Node], slots: Slots) -> None:
        """Set the successors of nodes, and the words of their draws."""
        slot, context = [n.slot for n in nodes], [n.context for n in nodes]
        kept_of = successors(self._graph, self._draft_tree, slots, slot, context)
        key, sample, generated, step = (
            getattr(slots, name).numpy(force=True)[slot, None]
            for name in ("key", "sample", "generated", "step")
        )
        rank, depth = (np.array([[getattr(n, x)] for n in nodes]) for x in ("rank", "depth"))
        index, position = rank * self.draws + np.arange(self.draws), generated + depth
        words = philox_words(key, index, position, sample, stepped(DRAFT, step))
        for node, known, word in zip(nodes, kept_of, words, strict=True):
            node.successors, node.words = known, word


@dataclass(slots=True)
class Successors:
    """Successors of one context in the graph, likeliest first."""

    token: list[int]
    cost: list[int]  # -log2 of the blended probability, times COST_ONE
    source: list[int]
    probability: np.ndarray = field(init=False)  # [W] float64, blended; the sum is at most 1
    probs: np.ndarray = field(init=False)  # [W] float64, normalised

    def __post_init__(self) -> None:
        self.probability = np.exp2(np.array(self.cost) / -COST_ONE)
        self.probs = self.probability / max(self.probability.sum(), 1e-300)


def successors(
    graph: ConsensusGraph,
    draft_tree: Callable,
    slots: Slots,
    slot: list[int],
    context: list[list[int]],
) -> list[Successors]:
    """Successors of each context (latest first) in its slot's group: one greedy level of drafts."""
    slot_index = torch.tensor(slot)
    level = Slots.empty(len(slot), 1, 1, slots.context.shape[1], device=slots.live.device)
    level.live.fill_(True)
    # greedy: the graph's order, without noise
    level.temperature.fill_(0)
    level.max_new.fill_(2)
    level.context.copy_(torch.tensor(context))
    for name in ("group", "key", "sample", "stop_ids"):
        setattr(level, name, getattr(slots, name)[slot_index])
    for name in ("group_key", "prompt_len", "prior_part"):
        setattr(level, name, getattr(slots, name))
    rows = len(slot) * (1 + MAX_CHILDREN)
    pool = draft_tree(graph.table, level, rows, replace(graph.config, max_depth=1, decay=1.0))
    columns = [x.tolist() for x in (pool.token, pool.cost, pool.source)]
    ranges = zip(pool.slot_start.tolist(), pool.slot_nodes.tolist(), strict=True)
    return [Successors(*(x[a + 1 : a + n] for x in columns)) for a, n in ranges]


def draw(probs: np.ndarray, words: np.ndarray) -> list[int]:
    """Index of each word's draw: inverse CDF of probs [W] at (word + 1/2) / 2^32."""
    cdf = probs.cumsum()
    index = np.searchsorted(cdf, (words + 0.5) * 2.0**-32 * cdf[-1], side="right")
    return np.minimum(index, len(probs) - 1).tolist()
