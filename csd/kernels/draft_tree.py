"""Draft every live slot's tree from the consensus graph: one pool of the likeliest nodes.

A node's contexts of all orders are looked up. With W_n the total of its context of order n (0 when
absent), w_n(t) the weight of successor t, c the smoothing weight, longest order first:

    rem_n = rem_{n+1} * c / (W_n + c)               what is left for shorter contexts
    q(t) = sum over n of rem_n * w_n(t) / c         = rem_{n+1} * lam_n * w_n(t) / W_n

q is rounded to multiples of 2^-31, and the node keeps its MAX_CHILDREN likeliest tokens, ties to
smaller tokens. Where the slot samples, they are scored with the very noise g that will decide:

    p(t) = exp(beta (log q(t) + g_t)) / (sum over kept s of the same
                                         + exp(beta (log (1 - sum q(s)) + 0.577)))

and p = q where it is greedy. An edge costs round(-log2(p) * 2^16), a path the sum of its edges, so
a child never costs less than its parent. Tokens that end the sample are not drafted.

Level by level, a slot's `frontier` cheapest nodes are expanded (ties: token, then the parent's
rank). Of all nodes seen, at most MAX_NODES - 1 a slot, the cheapest fill the pool's rows that the
roots leave; ties go by slot, depth, token and the parent's rank. Everything is float64 before the
one rounding, so other implementations reach the same integers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from csd.graph.table import PROMPT_BIT, SOURCES, GraphConfig, Table
from csd.kernels.graph_lookup import graph_lookup_ref
from csd.kernels.noise import SAMPLE, gumbel, philox_words_ref
from csd.pool import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, OWN, PROMPT, SIBLING, Pool, roots
from csd.slots import Slots

ONE = 1 << 31
# mean of a Gumbel: what the mass outside the kept children scores with
EULER_GAMMA = 0.5772156649015329
_NEVER = 1 << 30
_LOG2 = (1 << 16) / math.log(2)

Noise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def draft_tree_ref(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: Noise | None = None,
    out: Pool | None = None,
) -> Pool:
    """The step's pool in `rows` >= live rows; into `out` where given.

    noise(slot [F], position [F], token [F, K]) returns g [F, K] float64 in place of the slots'
    keyed noise, for replaying recorded samples.
    """
    pool = roots(slots, rows)
    live = int(slots.live.sum())
    if rows > live > 0:
        nodes = _grow(table, slots, pool.slot[:live].long(), rows - live, config, noise)
        if nodes is not None:
            _fill(pool, nodes, live, table, slots)
    if out is None:
        return pool
    for field in fields(Pool):
        getattr(out, field.name).copy_(getattr(pool, field.name))
    return out


@dataclass(slots=True)
class _Nodes:
    """Drafted nodes, each level sorted by (cost, token, parent's rank)."""

    cost: torch.Tensor  # [n] int64
    token: torch.Tensor  # [n] int64
    slot: torch.Tensor  # [n] int64
    depth: torch.Tensor  # [n] int64
    parent: torch.Tensor  # [n] int64, index into the concatenated levels, -1 for a root's child
    edge: torch.Tensor  # [n] int64, index into the table's successors
    context: torch.Tensor  # [n, N] int32

    def pick(self, index: torch.Tensor) -> "_Nodes":
        return _Nodes(*(getattr(self, f.name)[index] for f in fields(self)))


def _grow(table, slots, slot, budget, config, noise) -> _Nodes | None:
    """The `budget` likeliest nodes of all slots, best first; None when there are none."""
    if noise is None:
        noise = _keyed(slots)
    group_key = slots.group_key[slots.group.long()]
    limit = slots.max_new - 1 - slots.generated
    top = min(config.max_depth, MAX_DEPTH, int(limit.max()))
    ceiling = _NEVER
    if config.min_prob > 0:
        ceiling = min(ceiling, round(-math.log(config.min_prob) * _LOG2))
    context, cost = slots.context[slot], torch.zeros_like(slot)
    parent = torch.full_like(slot, -1)
    levels, costs, count = [], None, 0
    for depth in range(1, top + 1):
        room = limit[slot] >= depth
        if not bool(room.all()):
            slot, context, cost, parent = slot[room], context[room], cost[room], parent[room]
        if not slot.numel():
            break
        if not slot.numel():
            break
        position = slots.generated[slot] + depth - 1
        token, edge_cost, edge = _children(
            table, slots, config, slot, group_key[slot], context, position, noise
        )
        total = (cost[:, None] + edge_cost).flatten()
        code = (total << 31) | token.flatten()
        # of nodes dearer than the budget's last one so far, none can enter the pool
        child = (total <= ceiling).nonzero()[:, 0]
        if not child.numel():
            break
        child = child[code[child].argsort(stable=True)]
        at = child // token.shape[1]
        token = token.flatten()[child]
        level = _Nodes(
            cost=total[child],
            token=token,
            slot=slot[at],
            depth=torch.full_like(token, depth),
            parent=parent[at],
            edge=edge.flatten()[child],
            context=torch.cat([token[:, None].int(), context[at, :-1]], 1),
        )
        levels.append(level)
        costs = level.cost if costs is None else torch.cat([costs, level.cost])
        ceiling = min(ceiling, _threshold(costs, levels, budget))
        index = torch.arange(count, count + child.shape[0], device=slot.device)
        count += child.shape[0]
        front = level.cost <= ceiling
        if child.shape[0] > config.frontier:
            front &= _rank_in(level.slot) < config.frontier
        slot, context = level.slot[front], level.context[front]
        cost, parent = level.cost[front], index[front]
    if not levels:
        return None
    nodes = _Nodes(*(torch.cat([getattr(n, f.name) for n in levels]) for f in fields(_Nodes)))
    # stable: equal (cost, slot) stay in order of depth, token, parent's rank
    order = ((nodes.cost << 16) | nodes.slot).argsort(stable=True)
    if budget >= MAX_NODES:
        order = order[_rank_in(nodes.slot[order]) < MAX_NODES - 1]
    order = order[:budget]
    place = torch.full_like(nodes.cost, -1)
    place[order] = torch.arange(order.shape[0], device=slot.device)
    nodes = nodes.pick(order)
    nodes.parent = torch.where(nodes.parent >= 0, place[nodes.parent], -1)
    return nodes


def _threshold(costs: torch.Tensor, levels: list[_Nodes], budget: int) -> int:
    """Cost of the pool's last node if no more nodes came."""
    if budget >= MAX_NODES:
        costs, order = costs.sort(stable=True)
        slot = torch.cat([n.slot for n in levels])[order]
        costs = costs[_rank_in(slot) < MAX_NODES - 1]
    if costs.shape[0] < budget:
        return _NEVER
    return int(costs.kthvalue(budget).values)


def _rank_in(slot: torch.Tensor) -> torch.Tensor:
    """How many earlier elements have the same slot."""
    slot, order = slot.sort(stable=True)
    place = torch.arange(slot.shape[0], device=slot.device)
    first = torch.ones_like(slot, dtype=torch.bool)
    first[1:] = slot[1:] != slot[:-1]
    rank = torch.empty_like(slot)
    rank[order] = place - torch.where(first, place, 0).cummax(0).values
    return rank


def _keyed(slots: Slots) -> Noise:
    def noise(slot, position, token):
        word = philox_words_ref(
            slots.key[slot][:, None], token, position[:, None], slots.sample[slot][:, None], SAMPLE
        )
        return gumbel(word, torch.float64)

    return noise


def _children(table, slots, config, slot, group_key, context, position, noise):
    """Token, edge cost and edge [F, MAX_CHILDREN] of each frontier node; cost _NEVER if none."""
    E = table.succ_token.shape[1]
    # [F, O], longest order first
    entry = graph_lookup_ref(table, group_key, context, config.orders[::-1])[2]
    found, entry = (entry >= 0)[:, :, None], entry.clamp(min=0)
    total = table.entry_total[entry].double() * found[:, :, 0]
    rem = (config.smoothing / (total + config.smoothing)).cumprod(1)
    # [F, O * E]
    token = torch.where(found, table.succ_token[entry], -1).flatten(1)
    share = table.succ_weight[entry] * (rem / config.smoothing)[:, :, None]
    share = torch.where(found, share, 0).flatten(1)
    same = token[:, :, None] == token[:, None, :]
    q = torch.bmm(same.double(), share[:, :, None])[:, :, 0]
    # a token counts once, where its longest context has it
    again = same.tril(-1).any(2)
    q = (q * ONE).round_().long().clamp_(max=ONE)
    code = torch.where((q > 0) & ~again, ((ONE - q) << 31) | token, 1 << 62)
    width = min(MAX_CHILDREN, code.shape[1])
    code, at = code.topk(width, dim=1, largest=False)
    none = code == 1 << 62
    token = code & (ONE - 1)
    q = (ONE - (code >> 31)).masked_fill_(none, 0)
    edge = (entry[:, :, None] * E + torch.arange(E, device=slot.device)).flatten(1).gather(1, at)

    greedy = (slots.temperature[slot] <= 0)[:, None]
    beta = torch.where(greedy, 1.0, config.beta)
    score = (q.double() / ONE).log()
    rest = ((ONE - q.sum(1, keepdim=True)).clamp(min=0).double() / ONE).log()
    score = torch.where(greedy, score, score + noise(slot, position, token)) * beta
    rest = torch.where(greedy, rest, rest + EULER_GAMMA) * beta
    norm = torch.cat([score, rest], 1).logsumexp(1, keepdim=True)
    cost = ((norm - score) * _LOG2).round().clamp(0, _NEVER).long()
    stop = (token[:, :, None] == slots.stop_ids[slot][:, None, :]).any(2)
    return token, torch.where(none | stop, _NEVER + 1, cost), edge


def _fill(pool: Pool, nodes: _Nodes, live: int, table: Table, slots: Slots) -> None:
    """Put the nodes, best first, behind their roots; `pool` holds the roots alone."""
    device = nodes.cost.device
    slot = pool.slot[:live].long()
    place = torch.arange(live, device=device)
    # [n] which of the pool's slots a node is of, in the order of groups and slots
    of_slot = torch.empty_like(pool.slot_start, dtype=torch.int64)
    of_slot[slot] = place
    owner = of_slot[nodes.slot]
    order = owner.argsort(stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.shape[0], device=device)
    row += owner + 1
    drafted = torch.bincount(owner, minlength=live)
    start = drafted.cumsum(0) - drafted + place
    root = start[owner]
    parent = torch.where(nodes.parent >= 0, row[nodes.parent], root)

    end = start.new_full((1,), live + order.shape[0])
    pool.group_start.copy_(torch.cat([start, end])[pool.group_start.long()])
    pool.slot_start[slot] = start.int()
    pool.slot_nodes[slot] = (drafted + 1).int()
    for field in (pool.token, pool.slot, pool.position, pool.context):
        field[start] = field[:live].clone()
    pool.token[row] = nodes.token.int()
    pool.parent[row] = parent.int()
    pool.slot[row] = nodes.slot.int()
    pool.depth[row] = nodes.depth.int()
    pool.position[row] = pool.position[root] + nodes.depth.int()
    pool.score[row] = nodes.cost.int()
    pool.context[row] = nodes.context
    said = table.succ_source.view(-1)[nodes.edge]
    pool.source[row] = _source(said, slots.sample[nodes.slot])
    pool.ancestors[start] = 1
    # the 64th node's bit is the sign
    bit = 1 << (row - root)
    for depth in range(1, int(nodes.depth.max()) + 1):
        at = nodes.depth == depth
        pool.ancestors[row[at]] = bit[at] | pool.ancestors[parent[at]]


def _source(said: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """OWN, SIBLING or PROMPT of each edge, given who said it and whose node it is."""
    own = (said >> (sample % SOURCES)) & 1 == 1
    any_sample = said & ((1 << PROMPT_BIT) - 1) != 0
    return torch.where(own, OWN, torch.where(any_sample, SIBLING, PROMPT)).int()
