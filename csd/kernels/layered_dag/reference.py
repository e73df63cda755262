"""The drafts described in `csd/kernels/layered_dag/`, one node after another."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from csd.kernels.draft_tree.constants import MAX_COST, ONE, UNIT, max_path_cost
from csd.kernels.layered_dag.constants import SHIFT
from csd.state.pool import MAX_NODES, SIBLING, Pool, progress_penalties, roots
from csd.state.texts import CHANCE_ONE, Candidates, DagConfig


class _Node(NamedTuple):
    """A node; fields in the order in which nodes of a slot are compared."""

    cost: int
    depth: int
    token: int
    rank: int  # the parent's, among the nodes that were expanded with it
    above: "_Node | None"


def layered_dag_ref(
    candidates: Candidates,
    slots: Any,  # csd.state.slots.Slots
    rows: int,
    config: DagConfig,
    nodes: int | None = None,
) -> Pool:
    """The step's pool in `rows` >= live rows."""
    pool = roots(slots, rows)
    owners = [s for s in pool.slot.tolist() if s >= 0]
    most = rows - len(owners) if nodes is None else min(nodes, rows - len(owners))
    ahead = progress_penalties(slots).tolist()
    trees = {s: _grow(candidates, slots, s, config, ahead[s])[:most] for s in owners}
    # ties go by slot, then as within a slot
    every = sorted((n.cost, s, n[:4], i) for s, tree in trees.items() for i, n in enumerate(tree))
    kept = {(s, i) for _, s, _, i in every[:most]}
    for s, tree in trees.items():
        trees[s] = [n for i, n in enumerate(tree) if (s, i) in kept]
    _fill(pool, trees, ahead)
    return pool


def weigh(token: np.ndarray, chance: np.ndarray, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that follow a node, ascending, and the weights of its edges in multiples of 1 / ONE.

    token, chance: [n], of the candidates that go through the node, those that end there left out.
    """
    found, place = np.unique(token, return_inverse=True)
    count = np.bincount(place, minlength=found.size)
    mass = np.zeros(found.size, np.int64)
    np.add.at(mass, place, chance.astype(np.int64))
    total = token.size
    both = share * mass * total + (CHANCE_ONE - share) * count * count * CHANCE_ONE
    return found, np.minimum(both // np.maximum(count * total, 1) >> SHIFT, ONE)


def _grow(candidates: Candidates, slots: Any, s: int, config: DagConfig, ahead: int) -> list[_Node]:
    """The cheapest nodes of slot s, at most MAX_NODES - 1, by cost with its progress penalty."""
    token, chance = (x[s].numpy(force=True) for x in candidates)
    stops = set(slots.stop_ids[s].tolist())
    limit = min(token.shape[1], int(slots.max_new[s]) - 1 - int(slots.generated[s]))
    nodes: list[_Node] = []
    frontier: list[_Node | None] = [None]
    for depth in range(1, limit + 1):
        level = []
        for rank, above in enumerate(frontier):
            through = token[:, depth - 1] >= 0
            if above is not None:
                through &= token[:, depth - 2] == above.token
            if not through.any():
                continue
            found, weight = weigh(
                token[through, depth - 1], chance[through, depth - 1], config.share
            )
            # the heaviest, ties to smaller tokens
            for i in np.lexsort((found, -weight))[: config.children]:
                if weight[i] == 0 or int(found[i]) in stops:
                    continue
                edge = math.floor(-math.log(int(weight[i]) * (1 / ONE)) * UNIT + 0.5)
                cost = (above.cost if above else ahead) + edge
                if cost <= min(max_path_cost(config.limits) + ahead, MAX_COST):
                    level.append(_Node(cost, depth, int(found[i]), rank, above))
        level.sort(key=lambda n: n[:4])
        nodes = sorted([*nodes, *level], key=lambda n: n[:4])[: MAX_NODES - 1]
        frontier = [n for n in level[: config.width] if n in nodes]
        if not frontier:
            break
    return nodes


def _fill(pool: Pool, trees: dict[int, list[_Node]], ahead: list[int]) -> None:
    """Put trees behind their roots, which are all that `pool` holds; in the roots' order."""
    heads = [
        (int(pool.token[i]), int(pool.position[i]), pool.context[i].tolist())
        for i in range(len(trees))
    ]
    group_start = [0, *np.cumsum([1 + len(tree) for tree in trees.values()]).tolist()]
    pool.group_start.copy_(torch.tensor([group_start[i] for i in pool.group_start.tolist()]))
    row = 0
    for (s, tree), (token, position, latest) in zip(trees.items(), heads, strict=True):
        first = row
        pool.slot_start[s], pool.slot_nodes[s] = first, 1 + len(tree)
        at: dict[int, int] = {}  # by identity: equal nodes of different parents are different
        for node in [None, *tree]:
            parent = -1 if node is None else at[id(node.above)] if node.above else first
            context = latest if node is None else [node.token, *pool.context[parent].tolist()[:-1]]
            depth = 0 if node is None else node.depth
            word = 1 << row - first
            if parent >= 0:
                word |= int(pool.ancestors[parent])
            pool.token[row] = token if node is None else node.token
            pool.parent[row], pool.slot[row], pool.depth[row] = parent, s, depth
            pool.position[row] = position + depth
            # the 64th node's bit is the sign
            pool.ancestors[row] = word - (1 << 64) if word >> 63 == 1 else word
            pool.cost[row] = 0 if node is None else node.cost - ahead[s]
            if node is not None:
                pool.source[row], at[id(node)] = SIBLING, row
            pool.context[row] = torch.tensor(context)
            row += 1
