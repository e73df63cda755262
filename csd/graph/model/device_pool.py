"""Pool of the likeliest drafted nodes of all slots, in tensors of fixed shape."""

from dataclasses import dataclass

import torch

from csd.graph.model.slot_order import SlotOrder
from csd.state.pool import COST_ONE, MAX_NODES, MODEL, Pool
from csd.state.pool_builder import Nodes, pool_of, progress_penalties
from csd.state.slots import Slots

# largest cost of a path, as on the host
MOST = 16 * COST_ONE


@dataclass(slots=True)
class Drafted:
    """C candidates per slot, level by level; slots in the order of a `SlotOrder`."""

    token: torch.Tensor  # [S, C] int32
    parent: torch.Tensor  # [S, C] int64, number of the parent, -1 below the root
    chance: torch.Tensor  # [S, C] float64, probability of the path; 0 where there is no node
    estimate: torch.Tensor  # [S, C] float64, the model's estimate of the token
    levels: list[int]  # number of candidates per level; their sum is C


def pool_of_drafted(
    drafted: Drafted, order: SlotOrder, slots: Slots, rows: int, nodes: int | None
) -> tuple[Pool, torch.Tensor]:
    """Select at most `nodes` nodes into a pool of `rows` rows, at least as many as live slots.

    Returns the pool, and the estimates of each slot's sorted nodes [S, 1 + n] float64, the root's
    first; the pool holds a prefix of each slot's list.

    Nodes are ordered by path cost plus the slot's progress penalty; ties keep their order. So a
    parent comes before its children, and a slot's selected nodes are a prefix of its list.
    """
    device, S, C = slots.live.device, *drafted.token.shape
    # infinite where there is no node
    cost = -drafted.chance.log2() * COST_ONE
    penalty = progress_penalties(slots)[order.slot].double()[:, None]
    # sort within each slot, then over all slots
    key, number = (cost + penalty).sort(dim=1, stable=True)
    kept = min(C, MAX_NODES - 1)
    rank = torch.empty(S * kept, dtype=torch.int64, device=device)
    flat = key[:, :kept].reshape(-1)
    every = torch.arange(S * kept, device=device)
    rank[flat.argsort(stable=True)] = every
    room = rows - order.live.sum()
    most = room if nodes is None else room.clamp(max=nodes)
    keep = (rank < most) & (flat < torch.inf)
    every = torch.arange(C, device=device).expand(S, C)
    place = torch.empty_like(number).scatter_(1, number, every)
    chosen = number[:, :kept]
    above = drafted.parent.gather(1, chosen)
    below = place.gather(1, above.clamp(min=0)).clamp(max=kept - 1)
    below += torch.arange(S, device=device)[:, None] * kept
    levels = [torch.full((n,), i, device=device) for i, n in enumerate(drafted.levels, 1)]
    found = Nodes(
        cost=cost.gather(1, chosen).clamp(max=MOST).round(),
        token=drafted.token.gather(1, chosen),
        slot=torch.where(keep.view(S, kept), order.slot[:, None], -1),
        depth=torch.cat(levels)[chosen],
        parent=torch.where(above < 0, -1, below),
        source=torch.full((S, kept), MODEL, device=device),
    )
    pool = pool_of(slots, rows, Nodes(*(x.reshape(-1) for x in found)))
    estimate = torch.ones(S, 1 + kept, dtype=torch.float64, device=device)
    estimate[order.slot, 1:] = drafted.estimate.gather(1, chosen)
    return pool, estimate
