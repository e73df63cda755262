"""Pool of the likeliest drafted nodes of all slots, in tensors of fixed shape."""

from dataclasses import dataclass

import torch

from csd.graph.model.slot_order import SlotOrder
from csd.state.pool import COST_ONE, MAX_NODES, MODEL, Pool, progress_penalties, roots
from csd.state.slots import Slots

# cost of the least likely path, as on the host
MOST = 16 * COST_ONE


@dataclass(slots=True)
class Drafted:
    """C candidates of every slot, level by level; slots in the order of a `SlotOrder`."""

    token: torch.Tensor  # [S, C] int32
    parent: torch.Tensor  # [S, C] int64, number of the parent, -1 below the root
    chance: torch.Tensor  # [S, C] float64, of the path; 0 where there is no node
    estimate: torch.Tensor  # [S, C] float64, the model's of the token
    levels: list[int]  # candidates of each level; their sum is C


def pool_of_drafted(
    drafted: Drafted, order: SlotOrder, slots: Slots, rows: int, nodes: int | None
) -> tuple[Pool, torch.Tensor]:
    """Select at most `nodes` nodes into a pool of `rows` >= live rows.

    Returns the pool, and the estimates of each slot's sorted nodes [S, 1 + n] float64, the root's
    first; the pool holds a prefix of each.

    Nodes are ordered by path cost plus the slot's progress penalty; ties keep their order. So a
    parent comes before its children, and a slot's nodes are a prefix of its list.
    """
    device, S, C = slots.live.device, *drafted.token.shape
    # infinite where there is no node
    cost = -drafted.chance.log2() * COST_ONE
    penalty = progress_penalties(slots)[order.slot].double()[:, None]
    # within a slot, then over all
    key, number = (cost + penalty).sort(dim=1, stable=True)
    kept = min(C, MAX_NODES - 1)
    rank = torch.empty(S * kept, dtype=torch.int64, device=device)
    flat = key[:, :kept].reshape(-1)
    every = torch.arange(S * kept, device=device)
    rank[flat.argsort(stable=True)] = every
    room = rows - order.live.sum()
    most = room if nodes is None else room.clamp(max=nodes)
    keep = (rank < most) & (flat < torch.inf)
    count = keep.view(S, kept).sum(1)
    # [S], [S + 1]: rows of each place
    size = torch.where(order.live, count + 1, 0)
    first = torch.nn.functional.pad(size.cumsum(0), (1, 0))

    pool = roots(slots, rows)
    every = torch.arange(C, device=device).expand(S, C)
    place = torch.empty_like(number).scatter_(1, number, every)
    word, depth, context_of = _paths(drafted, place, slots.context[order.slot])
    chosen = number[:, :kept]
    above = drafted.parent.gather(1, chosen)
    below = place.gather(1, above.clamp(min=0)) + 1
    begin = first[:-1, None]
    columns = dict(
        token=drafted.token.gather(1, chosen),
        parent=begin + torch.where(above < 0, 0, below),
        slot=order.slot[:, None].expand(S, kept),
        depth=depth[chosen],
        ancestors=word.gather(1, chosen),
        cost=cost.gather(1, chosen).clamp(max=MOST).round(),
        source=torch.full((S, kept), MODEL, device=device),
    )
    columns["position"] = (slots.prompt_len[order.group] + slots.generated[order.slot])[
        :, None
    ] + columns["depth"]
    # nodes that are not selected go to rows after the pool
    at = torch.where(keep, (begin + 1 + torch.arange(kept, device=device)).reshape(-1), rows)
    root = torch.where(order.live, begin[:, 0], rows)
    # `roots` puts them one after another
    old = torch.where(order.live, torch.arange(S, device=device), rows)
    blank = Pool.empty(rows, S, slots.group_key.shape[0], slots.context.shape[1], device)
    for name in (*columns, "context"):
        field = getattr(blank, name)
        source = torch.cat([getattr(pool, name), field[:1]])
        wide = torch.cat([field, field[:1]])
        wide[root] = source[old]
        values = context_of.gather(1, chosen[..., None].expand(-1, -1, context_of.shape[2]))
        new = values.flatten(0, 1) if name == "context" else columns[name].reshape(-1)
        wide[at] = new.to(field.dtype)
        field.copy_(wide[:rows])
    blank.slot_start[order.slot] = torch.where(order.live, first[:-1], 0).int()
    blank.slot_nodes[order.slot] = size.int()
    blank.group_start.copy_(first[order.bounds])
    estimate = torch.ones(S, 1 + kept, dtype=torch.float64, device=device)
    estimate[order.slot, 1:] = drafted.estimate.gather(1, chosen)
    return blank, estimate


def _paths(
    drafted: Drafted, place: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ancestor words [S, C], depths [C] and contexts [S, C, N] of all candidates.

    place: [S, C], rows of the candidates behind their roots, less one.
    """
    S, device = place.shape[0], place.device
    # the root's are the first column
    words = torch.ones(S, 1, dtype=torch.int64, device=device)
    context_of, at = context[:, None], 0
    for size in drafted.levels:
        part = slice(at, at + size)
        above = drafted.parent[:, part] + 1
        bit = torch.ones_like(above) << (place[:, part] + 1).clamp(max=MAX_NODES - 1)
        words = torch.cat([words, bit | words.gather(1, above)], 1)
        parents = context_of.gather(1, above[..., None].expand(-1, -1, context_of.shape[2]))
        token = drafted.token[:, part, None].to(context_of.dtype)
        context_of = torch.cat([context_of, torch.cat([token, parents[..., :-1]], 2)], 1)
        at += size
    levels = [torch.full((n,), i, device=device) for i, n in enumerate(drafted.levels, 1)]
    return words[:, 1:], torch.cat(levels), context_of[:, 1:]
