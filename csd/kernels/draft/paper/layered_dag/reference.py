"""Reference of the drafts described in `csd/kernels/draft/paper/layered_dag/`, node by node."""

import math
from typing import Any, NamedTuple

import numpy as np

from csd.kernels.draft.constants import MAX_COST, ONE, UNIT, max_path_cost
from csd.kernels.draft.paper.layered_dag.constants import SHIFT
from csd.state.pool import MAX_NODES, SIBLING, Pool
from csd.state.pool_builder import Nodes, live_by_group, pool_of, progress_penalties
from csd.state.texts import CHANCE_ONE, Candidates, DagConfig


class _Node(NamedTuple):
    """A node; a slot's nodes are compared by the fields in this order."""

    cost: int
    depth: int
    token: int
    rank: int  # rank of the parent among the nodes that were expanded with it
    above: "_Node | None"


def layered_dag_ref(
    candidates: Candidates,
    slots: Any,  # csd.state.slots.Slots
    rows: int,
    config: DagConfig,
    nodes: int | None = None,
) -> Pool:
    """Returns the step's pool of `rows` rows, at least the number of live slots."""
    live, ahead = live_by_group(slots).tolist(), progress_penalties(slots).tolist()
    most = rows - len(live) if nodes is None else min(nodes, rows - len(live))
    trees = {s: _grow(candidates, slots, s, config, ahead[s]) for s in live}
    # ties go by slot, then as within a slot
    every = sorted((n.cost, s, i) for s, tree in trees.items() for i, n in enumerate(tree))
    drafted: list[tuple[int, ...]] = []
    # by identity: equal nodes of different parents are different
    place: dict[int, int] = {}
    for cost, s, i in every[:most]:
        n = trees[s][i]
        place[id(n)] = len(place)
        drafted.append((cost - ahead[s], n.token, s, n.depth, place.get(id(n.above), -1), SIBLING))
    columns = np.array(drafted, np.int64).reshape(-1, len(Nodes._fields)).T
    return pool_of(slots, rows, Nodes(*columns))


def weigh(token: np.ndarray, chance: np.ndarray, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that follow a node, ascending, and the weights of its edges in multiples of 1 / ONE.

    token, chance: [n], of the candidates that pass through the node and do not end there.
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
