"""Draft trees of all live slots from the consensus graph, in one pool.

From each root, level by level. A context's successors over the orders n, longest first:

    q(t) = sum of rem_n * lam_n * w_n(t) / W_n,  lam_n = W_n / (W_n + confidence),
    rem_n = product of (1 - lam_m) over the longer orders m

The likeliest MAX_CHILDREN of them are scored with the very noise g that verification will use for
this slot, position and token (coupled noise; Gumbel-max list sampling):

    p(t) = exp(beta (log q_t + g_t)) / [ sum over kept s of exp(beta (log q_s + g_s))
                                         + exp(beta (log rest + 0.577)) ],   rest = 1 - sum q

A greedy slot has p = q. A node costs round(-log2 p * 2^16) more than its parent; whole numbers make
every order exact. Each level extends a slot's `width` cheapest nodes. Then one threshold: the M -
live cheapest nodes of all slots, at most MAX_NODES rows a slot, ties by slot, depth, token, parent.
A child never costs less than its parent, so a slot keeps a prefix of its best-first list.
"""

import torch

from csd.graph.table import ONE, PROMPT_BIT, SAMPLE_BITS, GraphConfig, Table, context_hashes, find
from csd.kernels.noise import SAMPLE, gumbel, philox_words_ref
from csd.pool import MAX_CHILDREN, MAX_NODES, OWN, PROMPT, SIBLING, Pool
from csd.slots import Slots

EULER = 0.5772156649
# no path is worth following below 2^-16
MAX_COST = 16 * ONE
_FAR = torch.iinfo(torch.int32).max


def draft_tree_ref(table: Table, slots: Slots, rows: int, config: GraphConfig) -> Pool:
    """The pool of `rows` >= live slots rows; rows beyond what the graph offers are padding."""
    levels = _grow(table, slots, rows, config)
    return _assemble(levels, slots, rows)


class _Level:
    """Candidates of one depth as flat lists: those of all slots, and their parents' places."""

    def __init__(self, slot, depth, cost, token, parent, source, context):
        self.slot, self.depth, self.cost, self.token = slot, depth, cost, token
        self.parent, self.source, self.context = parent, source, context


def _grow(table: Table, slots: Slots, rows: int, config: GraphConfig) -> list[_Level]:
    """Roots, then the children of each level's cheapest nodes."""
    device = slots.live.device
    # groups in order, their slots in order
    key = torch.where(slots.live, slots.group, slots.count)
    order = key.argsort(stable=True)
    slot = order[: int(slots.live.sum())]
    zero = torch.zeros_like(slot)
    level = _Level(
        slot, 0, zero, slots.context[slot, 0].long(), zero - 1, zero, slots.context[slot]
    )
    levels, offset = [level], 0
    room = rows - slot.numel()
    left = (slots.max_new - slots.generated)[slot] - 1
    threshold = MAX_COST
    rank = torch.arange(slot.numel(), device=device)  # of each frontier node's slot
    node = torch.arange(slot.numel(), device=device)  # its place among all candidates
    for depth in range(1, config.max_depth + 1 if room else 1):
        token, cost, source = _children(table, slots, level, depth, config)
        cost = torch.where((depth <= left)[rank][:, None], cost + level.cost[:, None], _FAR)
        offset += level.slot.numel() if depth == 1 else 0
        usable = (cost <= threshold) & (token >= 0)
        parent, child = usable.nonzero(as_tuple=True)
        if not parent.numel():
            break
        context = torch.cat(
            [token[parent, child][:, None].int(), level.context[parent, :-1]], dim=1
        )
        level = _Level(
            level.slot[parent], depth, cost[parent, child], token[parent, child],
            node[parent], source[parent, child], context,
        )  # fmt: skip
        rank = rank[parent]
        node = torch.arange(offset, offset + parent.numel(), device=device)
        offset += parent.numel()
        levels.append(level)
        # what the room's last node costs so far bounds every later one
        costs = torch.cat([x.cost for x in levels[1:]])
        if costs.numel() >= room:
            threshold = min(threshold, int(costs.kthvalue(room).values))
        keep = _cheapest(level, rank, config.width) & (level.cost <= threshold)
        pick = keep.nonzero()[:, 0]
        level = _Level(*(getattr(level, f)[pick] if f != "depth" else depth for f in
                         ("slot", "depth", "cost", "token", "parent", "source", "context")))
        rank, node = rank[pick], node[pick]
    return levels


def _cheapest(level: _Level, rank, width: int) -> torch.Tensor:
    """Mask of each slot's `width` cheapest nodes of the level; ties by token, then parent."""
    order = _sort(rank, level.cost, level.token)
    sorted_rank = rank[order]
    start = torch.searchsorted(sorted_rank, sorted_rank)
    place = torch.arange(order.numel(), device=order.device) - start
    keep = torch.empty_like(place, dtype=torch.bool)
    keep[order] = place < width
    return keep


def _sort(*keys: torch.Tensor) -> torch.Tensor:
    """Order by the first key, then the second, ..., then the place in the list."""
    order = keys[-1].argsort(stable=True)
    for key in reversed(keys[:-1]):
        order = order[key[order].argsort(stable=True)]
    return order


def _children(table: Table, slots: Slots, level: _Level, depth: int, config: GraphConfig):
    """Token [F, W], extra cost [F, W] and source [F, W] of every frontier node's children."""
    slot = level.slot
    token, q, bits, rest = _blend(table, slots.group_key[slots.group[slot].long()], level.context,
                                  config)
    width = min(MAX_CHILDREN, token.shape[1])
    # stable: of equal probabilities the one of the longer order stays first
    q, pick = q.sort(dim=-1, descending=True, stable=True)
    q, pick = q[:, :width], pick[:, :width]
    token, bits = token.gather(1, pick), bits.gather(1, pick)
    position = slots.generated[slot] + depth - 1
    word = philox_words_ref(
        slots.key[slot][:, None],
        token.clamp(min=0),
        position[:, None],
        slots.sample[slot][:, None],
        SAMPLE,
    )
    beta = config.beta
    rest = (1 - q.sum(-1)).clamp(min=0)
    race = torch.exp(beta * (q.log() + gumbel(word)))
    other = torch.exp(beta * (rest.log() + EULER))
    coupled = race / (race.sum(-1) + other)[:, None]
    p = torch.where((slots.temperature[slot] == 0)[:, None], q, coupled)
    cost = (-p.log2() * ONE).clamp(max=_FAR // 2).round().long()
    token = torch.where(q > 0, token, -1)
    own = (bits >> (slots.sample[slot] % SAMPLE_BITS)[:, None]) & 1
    anyone = (bits & ((1 << PROMPT_BIT) - 1)) != 0
    source = torch.where(own == 1, OWN, torch.where(anyone, SIBLING, PROMPT))
    return token, cost, source


def _blend(table: Table, group, context, config: GraphConfig):
    """Successors over all orders: token [F, n], blended q [F, n] and source bits [F, n].

    A token stands once, where its longest order has it; q is 0 elsewhere.
    """
    hashes = context_hashes(group, context, config.orders)
    known = context[:, torch.tensor(config.orders) - 1] >= 0
    entry, _, _ = find(table, group, context, hashes, config.orders)
    found = ((entry >= 0) & known).flip(1)
    # [F, orders, ..], longest order first
    entry = entry.flip(1).clamp(min=0)
    total = torch.where(found, table.total[entry], 0).float() / ONE
    lam = total / (total + config.confidence)
    rem = torch.cumprod(1 - lam, dim=1)
    before = torch.cat([torch.ones_like(rem[:, :1]), rem[:, :-1]], dim=1)
    scale = before * lam / total.clamp(min=1 / ONE) / ONE
    weight = table.succ_weight[entry].float() * scale[..., None]
    token = torch.where(found[..., None], table.succ_token[entry], -1).flatten(1).long()
    weight = torch.where(token >= 0, weight.flatten(1), 0)
    # [F, n, n]
    same = token[:, :, None] == token[:, None, :]
    first = ~same.tril(-1).any(-1) & (token >= 0)
    q = torch.where(first, (same * weight[:, None, :]).sum(-1), 0)
    return token, q, table.succ_source[entry].flatten(1), rem[:, -1]


def _assemble(levels: list[_Level], slots: Slots, rows: int) -> Pool:
    """One threshold over all candidates, then the rows in the pool's order."""
    count = slots.count
    pool = Pool.empty(
        rows, count, slots.group_key.shape[0], slots.context.shape[1], slots.live.device
    )
    live = levels[0].slot.numel()
    slot, cost, token, parent, source = (
        torch.cat([getattr(x, f) for x in levels])
        for f in ("slot", "cost", "token", "parent", "source")
    )
    depth = torch.cat([torch.full_like(x.slot, x.depth) for x in levels])
    context = torch.cat([x.context for x in levels])
    # rank of a slot in the pool: groups in order, their slots in order
    rank = torch.empty(count, dtype=torch.int64, device=slot.device)
    rank[levels[0].slot] = torch.arange(live, device=slot.device)
    rank = rank[slot]

    order = _sort(rank, cost, depth, token)
    place = torch.arange(order.numel(), device=slot.device)
    place = place - torch.searchsorted(rank[order], rank[order])
    order = order[place < MAX_NODES]
    cheapest = _sort(cost[order], slot[order], depth[order], token[order])
    # roots cost nothing and have depth 0, so they are never cut
    cheapest = torch.cat([(depth[order] == 0).nonzero()[:, 0],
                          cheapest[depth[order][cheapest] > 0][: rows - live]])
    chosen = order[cheapest.sort().values]

    n = chosen.numel()
    row = torch.full_like(slot, -1)
    row[chosen] = torch.arange(n, device=slot.device)
    parent = parent[chosen]
    s = slot[chosen]
    pool.token[:n] = token[chosen].int()
    pool.slot[:n] = s.int()
    pool.depth[:n] = depth[chosen].int()
    pool.score[:n] = cost[chosen].int()
    pool.source[:n] = source[chosen].int()
    pool.context[:n] = context[chosen]
    pool.parent[:n] = torch.where(parent >= 0, row[parent.clamp(min=0)], -1).int()
    pool.position[:n] = (
        slots.prompt_len[slots.group[s].long()] + slots.generated[s] + depth[chosen]
    ).int()
    first = torch.searchsorted(rank[chosen], torch.arange(live, device=slot.device))
    pool.slot_start[levels[0].slot] = first.int()
    pool.slot_nodes.index_add_(0, s, torch.ones_like(s, dtype=torch.int32))
    bounds = torch.arange(pool.group_start.shape[0], device=slot.device)
    pool.group_start.copy_(torch.searchsorted(slots.group[s].long(), bounds))
    _ancestors(pool, n)
    return pool


def _ancestors(pool: Pool, n: int) -> None:
    """Ancestor words from parents, depth by depth."""
    s = pool.slot[:n].long()
    local = torch.arange(n, device=s.device) - pool.slot_start[s]
    word = torch.ones_like(local) << local
    parent = pool.parent[:n].long()
    pool.ancestors[:n] = word
    for depth in range(1, int(pool.depth.max()) + 1):
        at = (pool.depth[:n] == depth).nonzero()[:, 0]
        pool.ancestors[at] = word[at] | pool.ancestors[parent[at]]
