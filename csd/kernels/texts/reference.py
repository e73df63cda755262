"""Classes of slots with equal text, and their trees, in plain Python and PyTorch."""

import math
from dataclasses import replace

import torch

from csd.state.pool import COST_ONE, MAX_NODES, Pool, Texts
from csd.state.pool_builder import Nodes, pool_of
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# cost of a node, in a member's copy, that the member has not drafted itself
NOT_DRAFTED = 60 * COST_ONE


def representatives(slots: Slots) -> torch.Tensor:
    """[S] int64: the first live slot of each live slot's class, -1 of others."""
    same = slots.live[:, None] & slots.live & (slots.leader[:, None] == slots.leader)
    return torch.where(slots.live, same.int().argmax(1), -1)


def part_ref(slots: Slots, verdict: Verdict) -> None:
    """Updates the leaders after a step, in place: the first live slot of each class.

    Slots stay in one class if they have accepted the same tokens. The slots have advanced.
    """
    A = verdict.accept_row.shape[1]
    accepted = torch.arange(A, device=slots.live.device) < verdict.accept_count[:, None]
    token = torch.where(accepted, verdict.sample[verdict.accept_row.clamp(min=0).long()], -1)
    same = slots.live[:, None] & slots.live & (slots.leader[:, None] == slots.leader)
    same &= (token[:, None] == token).all(-1)
    slots.leader.copy_(torch.where(slots.live, same.int().argmax(1), slots.leader))


def _tree(pool: Pool, s: int) -> range:
    start = int(pool.slot_start[s])
    return range(start, start + int(pool.slot_nodes[s]))


def merge_ref(pool: Pool, slots: Slots) -> Pool:
    """Returns the pool of the class trees: at most MAX_NODES - 1 nodes each, the cheapest ones.

    Its slots are the first live ones of their classes. pool: draft trees of all live slots.
    """
    first = representatives(slots).tolist()
    columns: list[list[int]] = []  # of all classes, in the order of `Nodes`
    for s in dict.fromkeys(f for f in first if f >= 0):
        # by place: token, place above, depth, source, costs of its members; place 0 is the root
        nodes: list[tuple[int, int, int, int, list[int]]] = []
        child: dict[tuple[int, int], int] = {}
        for member in (t for t, leader in enumerate(first) if leader == s):
            place = {}
            for m in _tree(pool, member):
                token, parent = int(pool.token[m]), int(pool.parent[m])
                above = -1 if parent < 0 else place[parent]
                place[m] = child.setdefault((above, token), len(nodes))
                if place[m] == len(nodes):
                    nodes.append((token, above, int(pool.depth[m]), int(pool.source[m]), []))
                nodes[place[m]][-1].append(int(pool.cost[m]))
        cost = [_sum_cost(costs) for *_, costs in nodes]
        # stable: a child is never cheaper than its parent, and is found after it
        order = sorted(range(1, len(nodes)), key=cost.__getitem__)[: MAX_NODES - 1]
        row = {0: -1} | {place: len(columns) + i for i, place in enumerate(order)}
        for place in order:
            token, above, depth, source, _ = nodes[place]
            columns.append([cost[place], token, s, depth, row[above], source])
    fields = torch.tensor(columns, dtype=torch.int64).reshape(-1, len(Nodes._fields)).T
    leaders = _only(slots, sorted({f for f in first if f >= 0}))
    return pool_of(leaders, int(leaders.live.sum()) + len(columns), Nodes(*fields))


def _sum_cost(costs: list[int]) -> int:
    if len(costs) == 1:
        return costs[0]
    return math.floor(-math.log2(sum(2.0 ** (-cost / COST_ONE) for cost in costs)) * COST_ONE + 0.5)


def _only(slots: Slots, live: list[int]) -> Slots:
    """The same slots, of which only `live` are live."""
    flags = torch.zeros_like(slots.live)
    flags[live] = True
    return replace(slots, live=flags)


def spread_ref(texts: Pool, pool: Pool, slots: Slots) -> Pool:
    """Returns the pool in which every live slot has its class's tree, with `Pool.texts`.

    texts: class trees. pool: the trees that the members have drafted: a node's cost in a member's
    copy is the member's own, or NOT_DRAFTED.
    """
    first = representatives(slots).tolist()
    columns, rows = [], []
    for s, leader in enumerate(first):
        if leader < 0:
            continue
        tree = _tree(texts, leader)
        child = {(int(texts.parent[m]), int(texts.token[m])): m for m in tree}
        own = {}
        place = {}
        for m in _tree(pool, s):
            parent = int(pool.parent[m])
            at = tree[0] if parent < 0 else child.get((place.get(parent, -2), int(pool.token[m])))
            if at is not None:
                place[m], own[at] = at, int(pool.cost[m])
        base = len(columns)
        for m in tree[1:]:
            above = int(texts.parent[m])
            columns.append(
                [
                    own.get(m, NOT_DRAFTED),
                    int(texts.token[m]),
                    s,
                    int(texts.depth[m]),
                    base + above - tree[1] if above > tree[0] else -1,
                    int(texts.source[m]),
                ]
            )
    fields = torch.tensor(columns, dtype=torch.int64).reshape(-1, len(Nodes._fields)).T
    out = pool_of(slots, int(slots.live.sum()) + len(columns), Nodes(*fields))
    for s, leader in enumerate(first):
        if leader >= 0:
            rows.append((int(out.slot_start[s]), [*_tree(texts, leader)]))
    rows = [row for _, tree in sorted(rows) for row in tree]
    out.texts = Texts(texts, torch.tensor(rows, dtype=torch.int32, device=texts.token.device))
    return out
