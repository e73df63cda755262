"""Classes of slots with equal text, and their trees, in plain Python and PyTorch."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from csd.state.pool import COST_ONE, MAX_NODES, Pool, Texts
from csd.state.pool_builder import Nodes, pool_of
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# least cost of a node, in a member's copy, that the member has not drafted itself
NOT_DRAFTED = 16 * COST_ONE


def representatives(slots: Slots) -> torch.Tensor:
    """[S] int64: the first live slot of each live slot's class, -1 of others."""
    same = slots.live[:, None] & slots.live & (slots.leader[:, None] == slots.leader)
    return torch.where(slots.live, first_of(same), -1)


def first_of(same: torch.Tensor) -> torch.Tensor:
    """[S] int64: the first true column of each row of same [S, S], S if there is none."""
    # a GPU's argmax may return any of equal values
    S = same.shape[1]
    return torch.where(same, torch.arange(S, device=same.device), S).amin(1)


def part_ref(slots: Slots, verdict: Verdict) -> None:
    """Updates the leaders after a step, in place: the first live slot of each class.

    Slots stay in one class if they have accepted the same tokens. The slots have advanced.
    """
    A = verdict.accept_row.shape[1]
    accepted = torch.arange(A, device=slots.live.device) < verdict.accept_count[:, None]
    token = torch.where(accepted, verdict.sample[verdict.accept_row.clamp(min=0).long()], -1)
    same = slots.live[:, None] & slots.live & (slots.leader[:, None] == slots.leader)
    same &= (token[:, None] == token).all(-1)
    slots.leader.copy_(torch.where(slots.live, first_of(same), slots.leader))


class _Node(NamedTuple):
    """A node of a class tree."""

    token: int
    above: int  # index of the parent in the tree, -1 for the root
    depth: int
    source: int
    costs: list[int]  # of the members' nodes


def _rows(pool: Pool, s: int) -> range:
    start = int(pool.slot_start[s])
    return range(start, start + int(pool.slot_nodes[s]))


def merge_ref(pool: Pool, slots: Slots) -> Pool:
    """Returns the pool of the class trees: at most MAX_NODES - 1 nodes each, the cheapest ones.

    Its slots are the first live ones of their classes. pool: draft trees of all live slots.
    """
    first = representatives(slots).tolist()
    leaders = sorted({f for f in first if f >= 0})
    columns: list[tuple[int, ...]] = []
    for leader in leaders:
        tree = _union(pool, [s for s, f in enumerate(first) if f == leader])
        cost = [sum_cost(node.costs) for node in tree]
        # stable: a child is never cheaper than its parent, and comes after it
        order = sorted(range(1, len(tree)), key=cost.__getitem__)[: MAX_NODES - 1]
        # index of each node among all, -1 of the root
        index = {0: -1} | {n: len(columns) + i for i, n in enumerate(order)}
        for n in order:
            token, above, depth, source, _ = tree[n]
            columns.append((cost[n], token, leader, depth, index[above], source))
    live = torch.zeros_like(slots.live)
    live[leaders] = True
    return pool_of(replace(slots, live=live), len(leaders) + len(columns), _nodes(columns))


def _union(pool: Pool, members: list[int]) -> list[_Node]:
    """The members' nodes, equal ones once, in the order of members and rows."""
    tree: list[_Node] = []
    # (index of the parent, token) -> index
    index_of: dict[tuple[int, int], int] = {}
    for s in members:
        index: dict[int, int] = {-1: -1}
        for m in _rows(pool, s):
            above, token = index[int(pool.parent[m])], int(pool.token[m])
            index[m] = index_of.setdefault((above, token), len(tree))
            if index[m] == len(tree):
                tree.append(_Node(token, above, int(pool.depth[m]), int(pool.source[m]), []))
            tree[index[m]].costs.append(int(pool.cost[m]))
    return tree


def sum_cost(costs: list[int]) -> int:
    """Cost of the sum of the probabilities that have these costs."""
    if len(costs) == 1:
        return costs[0]
    return math.floor(-math.log2(sum(2.0 ** (-cost / COST_ONE) for cost in costs)) * COST_ONE + 0.5)


def _nodes(columns: list[tuple[int, ...]]) -> Nodes:
    return Nodes(*torch.tensor(columns, dtype=torch.int64).reshape(-1, len(Nodes._fields)).T)


def spread_ref(texts: Pool, pool: Pool, slots: Slots) -> Pool:
    """Returns the pool in which every live slot has its class's tree, with `Pool.texts`.

    texts: class trees. pool: the trees that the members have drafted: a node's cost in a member's
    copy is the member's own, or at least NOT_DRAFTED.
    """
    first = representatives(slots).tolist()
    columns: list[tuple[int, ...]] = []
    for s, leader in enumerate(first):
        if leader < 0:
            continue
        root, *tree = _rows(texts, leader)
        cost = _own_costs(texts, leader, pool, s)
        index = {root: -1} | {m: len(columns) + i for i, m in enumerate(tree)}
        for m in tree:
            above = int(texts.parent[m])
            cost.setdefault(m, max(NOT_DRAFTED, cost[above]))
            token, depth, source = (int(x[m]) for x in (texts.token, texts.depth, texts.source))
            columns.append((cost[m], token, s, depth, index[above], source))
    out = pool_of(slots, int(slots.live.sum()) + len(columns), _nodes(columns))
    row = torch.empty(out.rows, dtype=torch.int32, device=out.token.device)
    for s, leader in enumerate(first):
        if leader >= 0:
            rows, copies = _rows(texts, leader), _rows(out, s)
            row[copies.start : copies.stop] = torch.arange(rows.start, rows.stop)
    return replace(out, texts=Texts(texts, row))


def _own_costs(texts: Pool, leader: int, pool: Pool, s: int) -> dict[int, int]:
    """Costs of the nodes of slot s in `pool`, by their rows in `texts`; 0 of the root."""
    root, *tree = _rows(texts, leader)
    below = {(int(texts.parent[m]), int(texts.token[m])): m for m in tree}
    mine, *own = _rows(pool, s)
    row, cost = {mine: root}, {root: 0}
    for m in own:
        shared = below.get((row.get(int(pool.parent[m]), -1), int(pool.token[m])))
        if shared is not None:
            row[m], cost[shared] = shared, int(pool.cost[m])
    return cost
