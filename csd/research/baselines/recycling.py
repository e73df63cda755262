"""Token recycling (arXiv 2408.08696): each token's latest likely successors, as a tree.

A matrix has, for every token, the target's likeliest tokens after its latest verified node. The
tree adds successors of successors by rank: a node's score is the product of the fixed probabilities
(RANKS) of the ranks on its path. Without the target's probabilities, a drawn token counts as
likeliest, before previous ones.
"""

import heapq
from itertools import pairwise
from typing import Any

from csd.graph.host_tree import HostTree
from csd.research.baselines.host_drafter import HostDrafter
from csd.state.pool import SIBLING, Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

# share of draws in which the target drew the r-th likeliest token of the matrix's last update
RANKS = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02)


class Recycling(HostDrafter):
    """One matrix per group, shared by its samples."""

    def open(self, prompt: list[int]) -> tuple[dict, dict[int, list[int]]]:
        successors: dict[int, list[int]] = {}
        for token, after in pairwise(prompt):
            _put_first(successors, token, after)
        return {"last": prompt[-1]}, successors

    def extend(self, group: Any, sample: int, tokens: list[int], probs: list[float]) -> None:
        group[0][sample] = tokens[-1]

    def draft(self, group: Any, sample: int, tree: HostTree) -> None:
        last, successors = group
        heap: list[tuple[float, int, int]] = []

        def push(parent: int, token: int, chance: float) -> None:
            for rank, after in enumerate(successors.get(token, ())):
                heapq.heappush(heap, (-chance * RANKS[rank], parent, after))

        push(-1, last.get(sample, last["last"]), 1.0)
        while heap and not tree.full:
            chance, parent, token = heapq.heappop(heap)
            node = tree.add(parent, token, -chance, SIBLING)
            if node >= 0:
                push(node, token, -chance)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        super().insert(pool, slots, verdict)
        key, group = slots.group_key.tolist(), slots.group.tolist()
        top, drawn = verdict.top_token.tolist(), verdict.sample.tolist()
        rows = {
            row
            for path, count in zip(
                verdict.accept_row.tolist(), verdict.accept_count.tolist(), strict=True
            )
            for row in path[:count]
        }
        for row, (slot, token) in enumerate(
            zip(pool.slot.tolist(), pool.token.tolist(), strict=True)
        ):
            if slot < 0:
                continue
            successors = self._groups[key[group[slot]]][1]
            likely = [t for t in top[row] if t >= 0]
            if likely:
                successors[token] = likely
            elif row in rows:
                _put_first(successors, token, drawn[row])


def _put_first(successors: dict[int, list[int]], token: int, after: int) -> None:
    others = [t for t in successors.get(token, []) if t != after]
    successors[token] = [after, *others][:TOP]
