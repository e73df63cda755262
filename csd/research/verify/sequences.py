"""K sequences per slot, drawn from a drafting network, for multi-draft verifiers.

Sequence k of a slot draws its token at depth d from the network's distribution after its own
tokens, with the slot's noise word:

    word(key, k, position, sample, DRAFT | step << 3)

Sequences with the same tokens so far share one node of the pool, whose drafts are the next tokens
of them all: as in SpecInfer (arXiv 2305.09781) and SpecTr (arXiv 2310.15141), an accepted node
continues with the sequences that pass through it. A distribution is renormalised over the network's
likeliest tokens. The budget sets the numbers of sequences and levels before any draw, so they do
not depend on the draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from csd.graph.host_tree import pool_of_rows
from csd.kernels.common.noise import DRAFT, philox_words, stepped
from csd.research.draft_models.distributions import distributions
from csd.research.draft_models.drafter import ModelDrafter
from csd.research.draft_models.slots import DraftSlots
from csd.research.verify.sampled_tree import Drawn, Node, draw
from csd.state.pool import COST_ONE, MAX_NODES, MODEL, ROOT, Pool
from csd.state.slots import Slots


@dataclass(slots=True)
class Proposal:
    """Distributions from which a node's drafts are drawn."""

    token: list[int]  # [W]
    probs: np.ndarray  # [W] for all drafts, or [drafts, W], one row per draft


@dataclass(slots=True)
class _Growing:
    """State of the running step: each slot's nodes, and the current node of each sequence."""

    nodes: dict[int, list[Node]]
    current: dict[int, list[int]]


class Sequences:
    """Draft sequences of a step. draws: most draws per node, each with its own noise word."""

    def __init__(self, drafter: ModelDrafter, draws: int):
        self._drafter, self.draws = drafter, draws

    def grow(self, slots: Slots, live: int, nodes: int, choose: Callable) -> tuple[Pool, Drawn]:
        """Draw a pool of all live slots' roots and at most `nodes` drafts.

        choose(costs) returns the number of rows with these costs that are worth verifying.
        """
        drafter, host = self._drafter, DraftSlots.of(slots)
        first = slots.context.tolist()
        step = _Growing({s: [Node(first[s][0], s, 0, 0, ROOT, first[s])] for s in host.live}, {})
        depth = self._depths(host, nodes, choose)
        if depth:
            drafter.begin(host, drawn=True)
            # slots without a sequence read their unread tokens as well
            hidden = drafter.prefill.catch_up(host, slots)
            row = {(s, 0): i for i, s in enumerate(host.live)}
            for s, (count, _) in depth.items():
                step.current[s] = [0] * count
            for level in range(1, max(d for _, d in depth.values()) + 1):
                front = [s for s in host.live if s in depth and depth[s][1] >= level]
                fresh = self._level(front, level, hidden, row, step, host, slots)
                more = [x for x in fresh if depth[x[0]][1] > level]
                if not more:
                    break
                # numbers in a draft tree do not count the root
                parents = [row[s, step.nodes[s][n].parent] for s, n in more]
                hidden = drafter.read_nodes([(s, n - 1) for s, n in more], level, hidden[parents])
                row = {x: i for i, x in enumerate(more)}
        drafted = {s: [node.row() for node in tree[1:]] for s, tree in step.nodes.items()}
        pool = pool_of_rows(drafted, slots, live + nodes)
        flat = [n for tree in step.nodes.values() for n in tree]
        return pool, Drawn(flat, pool.slot_start.tolist())

    def _depths(self, host: DraftSlots, nodes: int, choose: Callable) -> dict[int, tuple[int, int]]:
        """(number of sequences, number of levels) of each slot that drafts."""
        each, over = divmod(nodes, max(len(host.live), 1))
        depths = {}
        for i, s in enumerate(host.live):
            room = min(each + (i < over), MAX_NODES - 1)
            count = min(self.draws, room)
            depth = min(self._drafter.depth, host.room[s], room // max(count, 1))
            if count and depth:
                depths[s] = count, depth
        costs = [
            self._cost(d, count)
            for count, depth in depths.values()
            for d in range(depth)
            for _ in range(count)
        ]
        worth = choose(costs) if costs else 0
        deepest = max((depth for _, depth in depths.values()), default=0)
        # whole levels of all slots, from the root down
        level = sum(
            sum(count * min(depth, n) for count, depth in depths.values()) <= worth
            for n in range(1, deepest + 1)
        )
        return {s: (count, min(depth, level)) for s, (count, depth) in depths.items() if level}

    def _cost(self, depth: int, count: int) -> int:
        """Cost of one of `count` drafts below a node of this depth, by its expected acceptance."""
        share = math.prod(self._drafter.levels(d) for d in range(depth + 1)) / count
        return round(-math.log2(max(share, 2.0**-16)) * COST_ONE)

    def _level(
        self,
        front: list[int],
        level: int,
        hidden: torch.Tensor,
        row: dict,
        step: _Growing,
        host: DraftSlots,
        slots: Slots,
    ) -> list[tuple[int, int]]:
        """Draw one token of every sequence; returns the new nodes (slot, number)."""
        drafter = self._drafter
        stands = [(s, n) for s in front for n in dict.fromkeys(step.current[s])]
        logits = drafter.net.logits(hidden[[row[x] for x in stands]])
        proposals = self._proposals(logits, stands, step, slots)
        fresh = []
        for s in front:
            tree, words = step.nodes[s], self._words(s, level, host, slots)
            for n in dict.fromkeys(step.current[s]):
                node = tree[n]
                node.successors = proposal = proposals[s, n]
                through = [k for k, node_of in enumerate(step.current[s]) if node_of == n]
                for i, k in enumerate(through):
                    probs = proposal.probs if proposal.probs.ndim == 1 else proposal.probs[i]
                    index = draw(probs, words[k : k + 1])[0]
                    node.drafts.append(index)
                    token = proposal.token[index]
                    number = drafter.trees[s].add(n - 1, token) + 1
                    if number == len(tree):
                        rank = sum(x.depth == level for x in tree)
                        cost = self._cost(level - 1, len(step.current[s]))
                        after = [token, *node.context[:-1]]
                        child = Node(token, s, level, cost, MODEL, after, n, rank, row_cost=cost)
                        tree.append(child)
                        node.children.append(number)
                        fresh.append((s, number))
                    step.current[s][k] = number
        return fresh

    def _proposals(
        self, logits: torch.Tensor, stands: list[tuple[int, int]], step: _Growing, slots: Slots
    ) -> dict[tuple[int, int], Proposal]:
        """The proposal of each node: one distribution for all drafts, or one per draft."""
        slot, heat = [s for s, _ in stands], self._drafter.temperature
        if not isinstance(heat, tuple):
            dist = distributions(logits, slot, slots, heat)
            whole = dist.renormalised()
            return {x: Proposal(dist.token[i].tolist(), whole[i]) for i, x in enumerate(stands)}
        # the likeliest tokens are the same at every temperature
        by_heat = [distributions(logits, slot, slots, t) for t in heat]
        each = [dist.renormalised() for dist in by_heat]
        out = {}
        for i, (s, n) in enumerate(stands):
            through = [k for k, node_of in enumerate(step.current[s]) if node_of == n]
            probs = np.stack([each[k][i] for k in through])
            out[s, n] = Proposal(by_heat[0].token[i].tolist(), probs)
        return out

    def _words(self, s: int, level: int, host: DraftSlots, slots: Slots) -> np.ndarray:
        """Noise words [draws] of a slot's sequences at depth `level`."""
        key, number = slots.key[s].numpy(force=True), slots.step[s].numpy(force=True)
        position = np.array(host.generated[s] + level)
        index, sample = np.arange(self.draws), np.array(host.sample[s])
        return philox_words(key, index, position, sample, stepped(DRAFT, number))
