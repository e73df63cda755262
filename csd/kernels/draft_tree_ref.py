"""The trees described in `csd/kernels/draft_tree.py`, in numpy."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from csd.graph.table import ANY, PROMPT_BIT, SOURCES, GraphConfig, Table
from csd.kernels.graph_lookup import find_contexts, hash_contexts
from csd.kernels.noise import SAMPLE, gumbel_words, philox_words
from csd.pool import (
    COST_ONE,
    MAX_CHILDREN,
    MAX_DEPTH,
    MAX_NODES,
    MOST_AHEAD,
    OWN,
    PROMPT,
    SIBLING,
    Pool,
    head_starts,
    roots,
)
from csd.slots import Slots

# probabilities are multiples of 1 / ONE
ONE = 1 << 24
# mean of a Gumbel: what the mass outside a context's successors scores with
EULER_GAMMA = 0.5772156649015329
# the least that is left for that mass
TAIL = 1e-3
# the highest cost with its head start; of the least likely path; of one of probability 1 / e
MAX_COST = (1 << 22) - 1
MAX_PATH_COST = MAX_COST - MOST_AHEAD
UNIT = COST_ONE / math.log(2)
_NONE = np.iinfo(np.int64).max
_LAST_TOKEN = (1 << 31) - 1

Noise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def draft_tree_ref(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: Noise | None = None,
    out: Pool | None = None,
    nodes: int | None = None,
) -> Pool:
    """The step's pool in `rows` >= live rows; into `out` where given.

    nodes: drafted nodes at most; as many as fit when not given.

    noise(slot [F], position [F], token [F, W]) returns g [F, W] float64 in place of the slots'
    keyed noise, for replaying recorded samples.
    """
    pool = roots(slots, rows)
    live = int(slots.live.sum())
    most = rows - live if nodes is None else min(nodes, rows - live)
    if live and most > 0:
        tree = _Growth(table, slots, config, noise)
        drafted = tree.grow(pool.slot[:live].numpy(force=True).astype(np.int64), most)
        if drafted is not None:
            _fill(pool, drafted, live)
    if out is None:
        return pool
    for field in fields(Pool):
        getattr(out, field.name).copy_(getattr(pool, field.name))
    return out


@dataclass(slots=True)
class _Nodes:
    """Drafted nodes [n] in order; a level's are sorted by (cost, token, parent's rank)."""

    cost: np.ndarray
    token: np.ndarray
    slot: np.ndarray
    depth: np.ndarray
    parent: np.ndarray  # place of the parent among the nodes, -1 for a root's child
    source: np.ndarray
    context: np.ndarray  # [n, N]

    def pick(self, index: np.ndarray) -> "_Nodes":
        return _Nodes(*(getattr(self, f.name)[index] for f in fields(self)))


class _Growth:
    """What growing the trees reads, in numpy."""

    key: np.ndarray
    group: np.ndarray
    group_key: np.ndarray
    sample: np.ndarray
    generated: np.ndarray
    max_new: np.ndarray
    temperature: np.ndarray
    context: np.ndarray
    stop_ids: np.ndarray

    def __init__(self, table: Table, slots: Slots, config: GraphConfig, noise: Noise | None):
        self.table, self.config, self.noise = table.arrays(), config, noise
        for name in self.__annotations__:
            setattr(self, name, getattr(slots, name).numpy(force=True))
        self.group_key = self.group_key[self.group]
        self.stop_ids = self.stop_ids[:, (self.stop_ids >= 0).any(0)]
        self.sampled = self.temperature > 0
        self.betas = np.array(config.betas)[:, None]
        self.head_start = head_starts(slots).numpy(force=True).astype(np.int64)

    def grow(self, slot: np.ndarray, budget: int) -> _Nodes | None:
        """The `budget` cheapest nodes of the slots' trees, best first; None when there are none."""
        config = self.config
        limit = np.minimum(self.max_new - 1 - self.generated, min(config.max_depth, MAX_DEPTH))
        ceiling = MAX_COST
        # head starts are in costs until the pool's nodes are picked
        cost, parent, context = self.head_start[slot], np.full_like(slot, -1), self.context[slot]
        levels, count, depth = [], 0, 0
        while True:
            depth += 1
            room = limit[slot] >= depth
            if not room.all():
                slot, cost, parent, context = slot[room], cost[room], parent[room], context[room]
            if not slot.size:
                break
            token, edge, source = self._children(slot, context, depth)
            total = cost[:, None] + edge
            # of nodes dearer than the budget's last one so far, none can enter the pool
            highest = np.minimum(max_path_cost(config) + self.head_start[slot], ceiling)
            at, child = (total <= highest[:, None]).nonzero()
            if not at.size:
                break
            total, token = total[at, child], token[at, child]
            order = ((total << 31) | token).argsort(kind="stable")
            at, child, total, token = at[order], child[order], total[order], token[order]
            level = _Nodes(
                cost=total,
                token=token,
                slot=slot[at],
                depth=np.full_like(at, depth),
                parent=parent[at],
                source=source[at, child],
                context=np.concatenate([token[:, None], context[at, :-1]], 1),
            )
            levels.append(level)
            ceiling = min(ceiling, _threshold(levels, budget))
            front = (total <= ceiling).nonzero()[0]
            if front.size > config.frontier:
                front = front[_rank_in(level.slot[front]) < config.frontier]
            slot, cost, context = level.slot[front], total[front], level.context[front]
            parent = front + count
            count += at.size
        if not levels:
            return None
        nodes = _cheapest(levels, budget)
        nodes.cost -= self.head_start[nodes.slot]
        return nodes

    def _children(
        self, slot: np.ndarray, context: np.ndarray, depth: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token, edge cost and source [F, W] of every frontier node's children."""
        table, F = self.table, slot.size
        entry = self._entries(slot, context)
        found = entry >= 0
        token = np.where(found[:, :, None], table.succ_token.take(entry, 0), -1)
        said = table.succ_source.take(entry, 0)
        mass = self._masses(slot, depth, entry, token, said)
        # whole numbers, so that sums are exact
        mass = np.floor(mass * ONE).astype(np.int64).reshape(F, -1)
        token = token.reshape(F, -1).astype(np.int64)

        # runs of equal tokens; each begins where its longest context has it
        place = np.arange(token.shape[1])
        key = np.sort((token << 7) | place, 1)
        place = key & 127
        token = key >> 7
        start = np.ones(key.shape, bool)
        np.not_equal(token[:, 1:], token[:, :-1], out=start[:, 1:])
        rows = np.arange(F)[:, None]
        at = start.ravel().nonzero()[0]
        q = np.minimum(np.add.reduceat(mass[rows, place].ravel(), at), ONE)
        flat = np.full(key.size, _NONE)
        flat[at] = np.where(q > 0, ((ONE - q) << 38) | key.ravel()[at], _NONE)
        code = flat.reshape(F, -1)
        code[token < 0] = _NONE
        code = np.sort(code, 1)[:, :MAX_CHILDREN]

        none = code == _NONE
        token = np.where(none, -1, (code >> 7) & _LAST_TOKEN)
        q = np.where(none, ONE, ONE - (code >> 38))
        cost = np.floor(-np.log(q * (1 / ONE)) * UNIT + 0.5).astype(np.int64)
        cost += self.config.level_cost
        lost = none | (token[:, :, None] == self.stop_ids[slot][:, None, :]).any(2)
        said = said.reshape(F, -1)[rows, np.where(none, 0, code & 127)]
        return token, np.where(lost, 2 * MAX_COST, cost), self._source(said, slot)

    def _entries(self, slot: np.ndarray, context: np.ndarray) -> np.ndarray:
        """[F, O] entries of the contexts, longest first, and of the group as a whole."""
        orders, group = self.config.orders[::-1], self.group_key[slot]
        code = hash_contexts(group, context, orders)
        entry, _ = find_contexts(self.table, group, context, code, orders)
        one = np.full_like(context, -1)
        one[:, 0] = ANY
        code = hash_contexts(group, one, (1,))
        return np.concatenate([entry, find_contexts(self.table, group, one, code, (1,))[0]], 1)

    def _masses(
        self, slot: np.ndarray, depth: int, entry: np.ndarray, token: np.ndarray, said: np.ndarray
    ) -> np.ndarray:
        """[F, O, E] what each successor of each context adds to its token's probability."""
        table, config = self.table, self.config
        total = np.where(entry >= 0, table.entry_total.take(entry), 0).astype(float)
        trust = total * config.trust / (total + float(config.smoothing))
        share, rem = np.empty(entry.shape), np.ones(entry.shape[0])
        for o in range(entry.shape[1]):
            share[:, o] = rem * trust[:, o]
            rem = rem * (1 - trust[:, o])
        total = np.maximum(total, 1)
        weight = np.where(token >= 0, table.succ_weight.take(entry, 0), 0).astype(float)
        mass = (share / total)[:, :, None] * weight
        noisy = self.sampled[slot]
        if not noisy.any():
            return mass
        own = (said >> (self.sample[slot] % SOURCES)[:, None, None]) & 1 == 1
        mine = np.where(own, weight * config.own_weight, weight)
        seen = weight.sum(2)
        scale = seen / (np.maximum(mine.sum(2), 1) * total)
        rest = np.log(np.maximum(1 - seen / total, TAIL)) + EULER_GAMMA
        g = self._gumbel(slot, depth, token.reshape(slot.size, -1)).reshape(token.shape)
        mine = mine * scale[:, :, None]
        with np.errstate(divide="ignore"):
            score = np.exp((np.log(mine) + g) * self.betas)
        norm = score.sum(2) + np.exp(rest * self.betas[:, 0])
        coupled = ((1 - config.uncoupled) / norm)[:, :, None] * score + config.uncoupled * mine
        return np.where(noisy[:, None, None], share[:, :, None] * coupled, mass)

    def _gumbel(self, slot: np.ndarray, depth: int, token: np.ndarray) -> np.ndarray:
        # the token of a node at depth d is generated token d - 1 from here
        position = self.generated[slot] + depth - 1
        token = np.maximum(token, 0)
        if self.noise is not None:
            return self.noise(*(torch.from_numpy(x) for x in (slot, position, token))).numpy()
        at = (self.key[slot][:, None], token, position[:, None], self.sample[slot][:, None])
        return gumbel_words(philox_words(*at, SAMPLE))

    def _source(self, said: np.ndarray, slot: np.ndarray) -> np.ndarray:
        own = (said >> (self.sample[slot] % SOURCES)[:, None]) & 1 == 1
        any_sample = said & ((1 << PROMPT_BIT) - 1) != 0
        return np.where(own, OWN, np.where(any_sample, SIBLING, PROMPT))


def max_path_cost(config: GraphConfig) -> int:
    """Of a path that is drafted."""
    if config.min_prob <= 0:
        return MAX_PATH_COST
    return min(MAX_PATH_COST, round(-math.log(config.min_prob) * UNIT))


def _rank_in(slot: np.ndarray) -> np.ndarray:
    """How many earlier elements have the same slot."""
    order = slot.argsort(kind="stable")
    slot = slot[order]
    rank = np.empty_like(slot)
    rank[order] = np.arange(slot.size) - slot.searchsorted(slot)
    return rank


def _threshold(levels: list[_Nodes], budget: int) -> int:
    """Cost of the pool's last node if no more nodes came."""
    cost = np.concatenate([n.cost for n in levels])
    if budget >= MAX_NODES:
        order = cost.argsort(kind="stable")
        slot = np.concatenate([n.slot for n in levels])[order]
        cost = cost[order[_rank_in(slot) < MAX_NODES - 1]]
    return MAX_COST if cost.size < budget else int(np.partition(cost, budget - 1)[budget - 1])


def _cheapest(levels: list[_Nodes], budget: int) -> _Nodes:
    """The `budget` cheapest nodes, best first."""
    nodes = _Nodes(*(np.concatenate([getattr(n, f.name) for n in levels]) for f in fields(_Nodes)))
    # stable: equal (cost, slot) stay in order of depth, token and parent's rank
    order = ((nodes.cost << 16) | nodes.slot).argsort(kind="stable")
    if budget >= MAX_NODES:
        order = order[_rank_in(nodes.slot[order]) < MAX_NODES - 1]
    order = order[:budget]
    place = np.empty_like(nodes.cost)
    place[order] = np.arange(order.size)
    nodes = nodes.pick(order)
    nodes.parent = np.where(nodes.parent >= 0, place[nodes.parent], -1)
    return nodes


def _fill(pool: Pool, nodes: _Nodes, live: int) -> None:
    """Put the nodes, best first, behind their roots; `pool` holds the roots alone."""
    slot = pool.slot[:live].numpy(force=True).astype(np.int64)
    # which of the pool's slots a node is of, in the order of groups and slots
    place_of = np.zeros(slot.max() + 1, np.int64)
    place_of[slot] = np.arange(live)
    owner = place_of[nodes.slot]
    order = owner.argsort(kind="stable")
    row = np.empty_like(order)
    row[order] = np.arange(order.size)
    row += owner + 1
    drafted = np.bincount(owner, minlength=live)
    start = drafted.cumsum() - drafted + np.arange(live)
    root = start[owner]
    parent = np.where(nodes.parent >= 0, row[nodes.parent], root)

    word = np.ones(live + row.size, np.int64)
    # the 64th node's bit is the sign
    word[row] = np.int64(1) << (row - root)
    for depth in range(1, nodes.depth.max() + 1):
        at = nodes.depth == depth
        word[row[at]] |= word[parent[at]]

    def put(field: torch.Tensor, at: np.ndarray, value: torch.Tensor | np.ndarray) -> None:
        field[torch.from_numpy(at).to(field.device)] = torch.as_tensor(value).to(field)

    for field in (pool.token, pool.slot, pool.position, pool.context):
        put(field, start, field[:live].clone())
    base = pool.position.numpy(force=True)[root]
    put(pool.token, row, nodes.token)
    put(pool.parent, row, parent)
    put(pool.slot, row, nodes.slot)
    put(pool.depth, row, nodes.depth)
    put(pool.position, row, base + nodes.depth)
    put(pool.cost, row, nodes.cost)
    put(pool.source, row, nodes.source)
    put(pool.context, row, nodes.context)
    pool.ancestors[: word.size] = torch.from_numpy(word).to(pool.ancestors)
    put(pool.slot_start, slot, start)
    put(pool.slot_nodes, slot, drafted + 1)
    end = np.append(start, word.size)
    pool.group_start.copy_(torch.from_numpy(end[pool.group_start.numpy(force=True)]))
