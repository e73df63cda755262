"""Draft every live slot's tree from its candidates, by the layered graph of the paper.

Candidate c has the tokens c_1 .. c_L. Equal tokens of one layer are one node, so that a node is a
pair (layer, token) whatever path its candidates took. With n(u, v) the number of candidates that go
from token u in layer d - 1 to v in layer d, n(u) its sum over v and P_c the probability with which
the target drew c_d, an edge weighs

    w(u, v) = alpha mean of P_c over the n(u, v)  +  (1 - alpha) n(u, v) / n(u)

and the root precedes every candidate's first token. As a chain the heaviest edge is followed layer
by layer (ties: smaller token); as a tree a node keeps its MAX_CHILDREN heaviest edges, and the
`frontier` cheapest nodes of a layer are expanded. Tokens that end the sample are not drafted.

Weights are integers, rounded down to multiples of 2^-24: alpha and P_c are multiples of 2^-16, so
nothing is lost before that. An edge costs round(-log2(w) * 2^16), and a path the sum of its edges.
The cheapest of all slots' nodes fill the pool, as in `csd/kernels/draft/`: the paper's drafts
and the default ones share one budget rule and one pool.

Li et al., "Speculative decoding for multi-sample inference", 2503.05330: consensus extraction.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch

from csd.kernels.common.operator import RecordOperator, numbers
from csd.kernels.draft.constants import LAYER_SHIFT, MAX_COST, ONE, SLOTS, UNIT, max_path_cost
from csd.state.pool import MAX_CHILDREN, MAX_NODES, SIBLING, Pool, empty_pool
from csd.state.pool_builder import Nodes, live_by_group, pool_of, progress_penalties
from csd.state.record import View
from csd.state.slots import MAX_STOP_IDS, Slots
from csd.state.texts import CHANCE_ONE, Candidates, DagConfig

__all__ = ["layered_dag", "layered_dag_ref", "layered_dag_triton"]

# slots read at once
BLOCK_S = 16
LAYER_WARPS = 8


class _DagNode(NamedTuple):
    """A node; a slot's nodes are compared by the fields in this order."""

    cost: int
    depth: int
    token: int
    rank: int  # rank of the parent among the nodes that were expanded with it
    above: "_DagNode | None"


def layered_dag_ref(
    candidates: Candidates,
    slots: Any,  # csd.state.slots.Slots
    rows: int,
    config: DagConfig,
    nodes: int | None = None,
) -> Pool:
    """Returns the step's pool of `rows` rows, at least the number of live slots."""
    live, ahead = live_by_group(slots).tolist(), progress_penalties(slots).tolist()
    max_drafted = rows - len(live) if nodes is None else min(nodes, rows - len(live))
    trees = {s: _grow(candidates, slots, s, config, ahead[s]) for s in live}
    # ties go by slot, then as within a slot
    every = sorted((n.cost, s, i) for s, tree in trees.items() for i, n in enumerate(tree))
    drafted: list[tuple[int, ...]] = []
    # by identity: equal nodes of different parents are different
    position: dict[int, int] = {}
    for cost, s, i in every[:max_drafted]:
        n = trees[s][i]
        position[id(n)] = len(position)
        drafted.append(
            (cost - ahead[s], n.token, s, n.depth, position.get(id(n.above), -1), SIBLING)
        )
    columns = np.array(drafted, np.int64).reshape(-1, len(Nodes._fields)).T
    return pool_of(slots, rows, Nodes(*columns))


def weigh(token: np.ndarray, chance: np.ndarray, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that follow a node, ascending, and the weights of its edges in multiples of 1 / ONE.

    token, chance: [n], of the candidates that pass through the node and do not end there.
    """
    tokens, inverse = np.unique(token, return_inverse=True)
    count = np.bincount(inverse, minlength=tokens.size)
    mass = np.zeros(tokens.size, np.int64)
    np.add.at(mass, inverse, chance.astype(np.int64))
    total = token.size
    both = share * mass * total + (CHANCE_ONE - share) * count * count * CHANCE_ONE
    return tokens, np.minimum(both // np.maximum(count * total, 1) >> LAYER_SHIFT, ONE)


def _grow(
    candidates: Candidates, slots: Any, s: int, config: DagConfig, ahead: int
) -> list[_DagNode]:
    """The cheapest nodes of slot s, at most MAX_NODES - 1, by cost with its progress penalty."""
    token, chance = (x[s].numpy(force=True) for x in candidates)
    stops = set(slots.stop_ids[s].tolist())
    limit = min(token.shape[1], int(slots.max_new[s]) - 1 - int(slots.generated[s]))
    nodes: list[_DagNode] = []
    frontier: list[_DagNode | None] = [None]
    for depth in range(1, limit + 1):
        level = []
        for rank, above in enumerate(frontier):
            through = token[:, depth - 1] >= 0
            if above is not None:
                through &= token[:, depth - 2] == above.token
            if not through.any():
                continue
            following, weight = weigh(
                token[through, depth - 1], chance[through, depth - 1], config.share
            )
            # the heaviest, ties to smaller tokens
            for i in np.lexsort((following, -weight))[: config.children]:
                if weight[i] == 0 or int(following[i]) in stops:
                    continue
                edge = math.floor(-math.log(int(weight[i]) * (1 / ONE)) * UNIT + 0.5)
                cost = (above.cost if above else ahead) + edge
                if cost <= min(max_path_cost(config.limits) + ahead, MAX_COST):
                    level.append(_DagNode(cost, depth, int(following[i]), rank, above))
        level.sort(key=lambda n: n[:4])
        nodes = sorted([*nodes, *level], key=lambda n: n[:4])[: MAX_NODES - 1]
        frontier = [n for n in level[: config.width] if n in nodes]
        if not frontier:
            break
    return nodes


def layered_dag_triton(
    candidates: Candidates, slots: Slots, rows: int, config: DagConfig, nodes: int | None = None
) -> Pool:
    """Two launches: every slot's nodes, then the pool."""
    import triton

    from csd.kernels.draft.paper.triton import DagLayers, layered_dag_kernel
    from csd.kernels.draft.triton.launch import fill_pool

    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    _, P, L = candidates.token.shape
    device = slots.live.device
    pool = empty_pool(rows, S, G, N, device)
    max_drafted = rows if nodes is None else nodes
    block_f = triton.next_power_of_2(config.width)
    lists = torch.empty((S, MAX_NODES), dtype=torch.int64, device=device)
    children = torch.empty((S, block_f * MAX_CHILDREN), dtype=torch.int64, device=device)
    pointers = SLOTS(slots)
    layered_dag_kernel[(S,)](
        slots=pointers,
        candidates=candidates,
        nodes_ptr=lists,
        children_ptr=children,
        S=S,
        rows=rows,
        max_drafted=max_drafted,
        max_cost=max_path_cost(config.limits),
        C=DagLayers(
            P=P,
            BLOCK_P=triton.next_power_of_2(P),
            L=L,
            SHARE=config.share,
            CHANCE=CHANCE_ONE,
            FRONTIER=config.width,
            BLOCK_F=block_f,
            KEPT=config.children,
            STOPS=MAX_STOP_IDS,
            BLOCK_S=BLOCK_S,
        ),
        num_warps=LAYER_WARPS,
    )
    fill_pool(lists, pointers, pool, max_drafted)
    return pool


CANDIDATES = View(Candidates)
# fields of a DagConfig that extraction reads
_CONFIG = ("alpha", "tree", "frontier", "min_prob")


def _with_config(run: Callable) -> Callable:
    @wraps(run)
    def call(candidates: Candidates, slots: Any, rows: int, *numbers: Any) -> Pool:
        *chosen, nodes = numbers
        config = DagConfig(**dict(zip(_CONFIG, chosen, strict=True)))
        return run(candidates, slots, rows, config, nodes=nodes)

    return call


def _fake(candidates: Any, slots: Any, rows: int, *rest: Any) -> Pool:
    groups, context = slots.group_key.shape[0], slots.context.shape[1]
    return empty_pool(rows, slots.count, groups, context, slots.live.device)


_layered_dag = RecordOperator(
    "layered_dag",
    (
        CANDIDATES,
        SLOTS,
        "SymInt rows",
        *numbers(DagConfig, _CONFIG),
        "SymInt nodes",
    ),
    _with_config(layered_dag_ref),
    _with_config(layered_dag_triton),
    returns=Pool,
    fake=_fake,
)


def layered_dag(
    candidates: Candidates, slots: Slots, rows: int, config: DagConfig, nodes: int | None = None
) -> Pool:
    """Returns the nodes of all live slots' drafts, in a pool of `rows` rows.

    rows: at least the number of live slots. nodes: most drafted nodes over all slots, by default as
    many as fit. config: only alpha, tree, frontier and min_prob are used.
    """
    _layered_dag.check({"S": slots.count}, slots.live.device, candidates, slots)
    _, P, L = candidates.token.shape
    if P > 256 or L > 16:
        raise ValueError(f"candidates must be at most 256 of 16 tokens, got {P} of {L}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if nodes is not None and nodes < 0:
        raise ValueError(f"nodes must be at least 0, got {nodes}")
    max_drafted = rows if nodes is None else nodes
    chosen = (getattr(config, name) for name in _CONFIG)
    return _layered_dag(candidates, slots, rows, *chosen, max_drafted)
