"""Pools from drafted nodes: the definition of their rows, and of the costs that select them.

`csd/kernels/draft/cpu/pools.py` and `csd/kernels/draft/triton/fill.py` fill pools in the other
backends."""

from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from csd.state.pool import (
    MAX_DEPTH,
    MAX_GROUP_PENALTY,
    MAX_NODES,
    MAX_PROGRESS_PENALTY,
    ROOT,
    Pool,
    empty_pool,
)
from csd.state.record import declared
from csd.state.slots import Slots

Array = TypeVar("Array", np.ndarray, torch.Tensor)
# a word whose reach is doubled this many times has all ancestors
ROUNDS = MAX_DEPTH.bit_length()


class Nodes(NamedTuple, Generic[Array]):
    """Drafted nodes [n]; those of one slot are in the order of their rows, parents first."""

    cost: Array
    token: Array
    slot: Array  # -1: not in the pool
    depth: Array
    parent: Array  # index of the parent among the nodes, -1 for a root's child
    source: Array


def live_by_group(slots: Slots) -> np.ndarray:
    """Live slots [L] int64, in the order of a pool."""
    live, group = slots.live.numpy(force=True).nonzero()[0], slots.group.numpy(force=True)
    return live[group[live].argsort(kind="stable")]


def allocate_pool(slots: Slots, rows: int) -> Pool:
    """Allocates a pool of `rows` rows for the slots; nothing is written."""
    groups, context = slots.group_key.shape[0], slots.context.shape[1]
    return empty_pool(rows, slots.count, groups, context, slots.live.device)


def pool_of(slots: Slots, rows: int, nodes: Nodes[Any] | None = None) -> Pool:
    """Returns a pool of the live slots' roots and of nodes, which all fit into its `rows` rows.

    A slot's rows are its root and then its nodes in their order. Shapes do not depend on values.
    """
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    device = slots.live.device
    # nodes that are not in the pool are written to an extra row
    pool = Pool.empty(rows + 1, S, G, N, device)
    every, zero = torch.arange(S, device=device), torch.zeros(S, dtype=torch.int64, device=device)
    pooled = Nodes(
        zero,
        slots.context[:, 0].long(),
        torch.where(slots.live, every, -1),
        zero,
        zero - 1,
        zero + ROOT,
    )
    above = every
    if nodes is not None:
        drafted = Nodes(*(torch.as_tensor(x).to(device, torch.int64) for x in nodes))
        # the root of slot s is entry s
        below = torch.where(drafted.parent < 0, drafted.slot.clamp(min=0), drafted.parent + S)
        above = torch.cat([every, below])
        pooled = Nodes(*(torch.cat(pair) for pair in zip(pooled, drafted, strict=True)))
    held, owner = pooled.slot >= 0, pooled.slot.clamp(min=0)
    size = zero.index_add(0, owner, held.long())
    # dead slots sort after every live one; stable keeps the slots of a group in order
    rank = torch.where(slots.live, slots.group, G)
    order = rank.argsort(stable=True)
    end = size[order].cumsum(0)
    start = zero.index_copy(0, order, end - size[order])
    by_slot = torch.where(held, pooled.slot, S).argsort(stable=True)
    offset = torch.arange(by_slot.shape[0], device=device) - (size.cumsum(0) - size)[owner[by_slot]]
    offset = torch.empty_like(offset).index_copy_(0, by_slot, offset)
    row = torch.where(held, start[owner] + offset, rows)

    position = slots.prompt_len[slots.group.clamp(min=0)] + slots.generated
    values = dict(
        token=pooled.token,
        parent=torch.where(pooled.depth == 0, -1, row[above]),
        slot=pooled.slot,
        depth=pooled.depth,
        position=position[owner] + pooled.depth,
        ancestors=_words(offset, above) if nodes is not None else held.long(),
        cost=pooled.cost,
        source=pooled.source,
        context=_contexts(slots.context, pooled, above) if nodes is not None else slots.context,
    )
    for name, value in values.items():
        field = getattr(pool, name)
        field[row] = value.to(field.dtype)
    pool.slot_start.copy_(torch.where(slots.live, start, 0))
    pool.slot_nodes.copy_(size)
    bounds = torch.searchsorted(rank[order], torch.arange(G + 1, device=device).to(rank.dtype))
    pool.group_start.copy_(torch.nn.functional.pad(end, (1, 0))[bounds])
    return replace(pool, **{name: getattr(pool, name)[:rows] for name in values})


def _words(index: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """[n] int64: a bit for a node's place in its slot, and for each place above it."""
    word = torch.ones_like(index) << index.clamp(0, MAX_NODES - 1)
    for _ in range(ROUNDS):
        word, above = word | word[above], above[above]
    return word


def _contexts(context: torch.Tensor, nodes: Nodes, above: torch.Tensor) -> torch.Tensor:
    """[n, N]: tokens of a node and of those above it, then its slot's, latest first."""
    path = [torch.arange(above.shape[0], device=above.device)]
    for _ in range(context.shape[1] - 1):
        path.append(above[path[-1]])
    offset = torch.arange(len(path), device=above.device) - nodes.depth[:, None]
    committed = context[nodes.slot.clamp(min=0)].gather(1, offset.clamp(min=0))
    return torch.where(offset < 0, nodes.token[torch.stack(path, 1)], committed)


def roots(slots: Slots, rows: int) -> Pool:
    """Returns a pool of the live slots' roots only; rows: at least the number of live slots."""
    return pool_of(slots, rows)


def progress_penalties(slots: Slots) -> torch.Tensor:
    """[S] int32: added to the costs of each slot's nodes in the selection of a step's nodes.

    min(progress_penalty * (generated - the fewest of a live slot), MAX_PROGRESS_PENALTY)
    """
    fewest = torch.where(slots.live, slots.generated, torch.iinfo(torch.int32).max).amin()
    return (slots.progress_penalty * (slots.generated - fewest)).clamp(0, MAX_PROGRESS_PENALTY)


def slot_penalties(slots: Slots, group_penalty: int) -> torch.Tensor:
    """[S] int64: the larger of progress penalty and group penalty (`csd/kernels/draft/`)."""
    progress, live, group = progress_penalties(slots).long(), slots.live, slots.group
    mates = live & (slots.step[:, None] == slots.step)
    fewest = torch.where(mates, slots.generated, slots.generated[:, None]).amin(1)
    penalties = ((slots.generated - fewest).long() * group_penalty).clamp(0, MAX_GROUP_PENALTY)
    several = (live & live[:, None] & (group != group[:, None])).any()
    return torch.maximum(progress, torch.where(several | (slots.temperature > 0), 0, penalties))


def node_costs(pool: Pool, slots: Slots) -> tuple[torch.Tensor, list[int], list[int] | None]:
    """Costs by which a step's nodes are selected: `Pool.cost` plus the slot's progress penalty.

    Returns the costs of all rows, [M] int32, without the penalty for roots; those of the drafted
    nodes; and each slot's penalty, -1 without a sample, or None while samples wait for slots.
    """
    drafted, penalty = pool.depth > 0, progress_penalties(slots)
    cost = pool.cost + torch.where(drafted, penalty[pool.slot.clamp(min=0).long()], 0)
    penalties = torch.where(slots.live, penalty, -1)
    # one copy for the host
    copied = torch.cat([penalties, slots.progress_penalty[:1], cost[drafted]]).tolist()
    S = slots.count
    return cost, copied[S + 1 :], copied[:S] if copied[S] else None


def prune(pool: Pool, rows: int, cost: torch.Tensor | None = None) -> Pool:
    """Returns the `rows` cheapest rows of a pool, in the same order: a prefix of each slot's rows.

    cost: [M] int32, by default the pool's own. No row costs less than its parent; roots cost 0.
    """
    if rows >= pool.rows:
        return pool
    cost = pool.cost if cost is None else cost
    # stable: of ties the first row is kept, so a child is never kept without its parent
    order = torch.where(pool.slot >= 0, cost.long(), 1 << 40).argsort(stable=True)
    keep = torch.zeros(pool.rows, dtype=torch.bool, device=pool.token.device)
    keep[order[:rows]] = True
    row = keep.nonzero()[:, 0]
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0)).int()
    pruned = {n: getattr(pool, n)[row] for n, f in declared(Pool).items() if f.shape[0] == "M"}
    parent, slot = pruned["parent"], pruned["slot"]
    pruned["parent"] = torch.where(parent >= 0, before[parent.clamp(min=0).long()], -1)
    nodes = torch.zeros_like(pool.slot_nodes)
    nodes.index_add_(0, slot.clamp(min=0).long(), (slot >= 0).to(nodes.dtype))
    return Pool(
        **pruned,
        slot_start=before[pool.slot_start.long()],
        slot_nodes=nodes,
        group_start=before[pool.group_start.long()],
    )
