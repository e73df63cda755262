"""The trees described in `csd/kernels/draft/`, in numpy.

`Estimates` has the formulas of a level's children, `cheapest` selects nodes of all slots, and
`draft_pool` makes them a pool. For the few elements of a level the overhead of a numpy call exceeds
its work, so a level takes a fixed number of calls over all slots, on flat lists of the existing
contexts and of their successors, without padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from csd.kernels.common.noise import SAMPLE, gumbel_words, philox_words
from csd.kernels.common.sorted_runs import rank_in_run, stable_order, starts
from csd.kernels.draft.constants import (
    EULER_GAMMA,
    MAX_COST,
    ONE,
    SLOTS,
    TAIL,
    UNIT,
    DraftNoise,
    level_cost,
    max_path_cost,
)
from csd.kernels.table.lookup import find_contexts, hash_contexts, order_masks
from csd.state.context_table import ANY, PRIOR_KEY, PROMPT_BIT, SAMPLE_BITS, GraphConfig, Table
from csd.state.pool import (
    HISTORY,
    MAX_CHILDREN,
    MAX_DEPTH,
    MAX_NODES,
    OWN,
    PRIOR,
    PROMPT,
    SIBLING,
    Pool,
)
from csd.state.pool_builder import Nodes, live_by_group, pool_of, slot_penalties
from csd.state.slots import Slots


class Children(NamedTuple):
    """Children of all nodes of a level [n]; those of one slot and token are in order of parents."""

    parent: np.ndarray  # index in the level
    token: np.ndarray
    edge: np.ndarray  # cost of the edge
    source: np.ndarray


class Estimates:
    """Table, noise and slots' fields from which children are estimated, as numpy arrays."""

    def __init__(self, table: Table, slots: Any, config: GraphConfig, noise: DraftNoise | None):
        self.table, self.config, self.noise = table.arrays(), config, noise
        self.slots = SLOTS.arrays(slots)
        self.stop_ids = self.slots.stop_ids[:, (self.slots.stop_ids >= 0).any(0)]
        self.sampled = self.slots.temperature > 0
        self.bit = self.slots.sample % SAMPLE_BITS
        self.level_cost = level_cost(config, self.slots.generated, self.slots.step)
        self.owner = self.slots.group_key[self.slots.group]
        # by context, in the order of the estimate: the group's, the prior's, the group as a whole
        *betas, last = config.betas
        of_prior = len(config.prior_orders) if table.prior is not None else 0
        self.of_prior = np.repeat([False, True, False], [len(betas), of_prior, 1])
        self.betas = np.array([*betas, *config.prior_betas[:of_prior], last])
        self.smoothing = np.where(self.of_prior, config.prior_smoothing, config.smoothing)
        self.trust = np.where(self.of_prior, config.prior_trust, config.trust)
        # the group as a whole is a context of every node
        whole = np.full_like(self.slots.context, -1)
        whole[:, 0] = ANY
        code = hash_contexts(self.owner, whole, (1,))[:, 0]
        self.whole = find_contexts(self.table, self.owner, whole, code)

    def children(
        self,
        slot: np.ndarray,  # [F] int64
        context: np.ndarray,  # [F, N]
        depth: int,  # the children's
        highest: np.ndarray,  # [F], largest cost of an edge
    ) -> Children | None:
        """Estimates the children of nodes with these slots and contexts; None if there are none."""
        F = slot.size
        pair, entry, share, total = self._contexts(slot, context)
        if not pair.size:
            return None
        node, order = np.divmod(pair, len(self.betas))
        # [P, E]
        token = self._successors("succ_token", order, entry, -1)
        weight = self._successors("succ_weight", order, entry, 0).astype(float)
        sources = self._successors("succ_source", order, entry, 0)

        E = token.shape[1]
        # all successors, sorted by slot, token, node and order, longest first
        held = (token >= 0).ravel().nonzero()[0]
        pair = held // E
        key = (slot << 31)[node[pair]] | token.ravel()[held]
        by = stable_order(key, self.slots.live.size << 31)
        held, pair, key = held[by], pair[by], key[by]
        new_key = starts(key)

        mass = (share / total)[:, None] * weight
        noisy = self.sampled[slot[node]]
        if noisy.any():
            g = np.zeros(token.size)
            g[held] = self._gumbel(key[new_key], depth)[new_key.cumsum() - 1]
            coupled = self._coupled(
                slot[node], order, weight, total, sources, g.reshape(token.shape)
            )
            mass = np.where(noisy[:, None], share[:, None] * coupled, mass)
        # integers, so that sums are exact
        mass = np.floor(mass.ravel()[held] * ONE).astype(np.int64)

        # runs of one node and token; the first of each is from its longest context
        first = new_key | starts(node[pair])
        index = first.nonzero()[0]
        q = np.minimum(np.add.reduceat(mass, index), ONE)
        parent, held = node[pair[index]], held[index]
        edge = np.floor(-np.log(np.maximum(q, 1) * (1 / ONE)) * UNIT + 0.5).astype(np.int64)
        edge += self.level_cost[slot[parent]]
        selected = ((edge <= highest[parent]) & (q > 0)).nonzero()[0]
        if selected.size > MAX_CHILDREN:
            selected = selected[_likeliest(parent[selected], q[selected], F)]
        parent, token = parent[selected], token.ravel()[held[selected]]
        if self.stop_ids.size:
            open_ = ~(token[:, None] == self.stop_ids[slot[parent]]).any(1)
            parent, token, selected = parent[open_], token[open_], selected[open_]
        source = self._source(sources.ravel()[held[selected]], slot[parent])
        return Children(parent, token, edge[selected], source)

    def _contexts(
        self, slot: np.ndarray, context: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Finds the P contexts that are in the table, by node, longest first.

        Returns node * O + order, entry, share of the estimate, and total, each [P].
        """
        entries = [_entries(self.table, self.owner[slot], context, self.config.orders)]
        totals = [self.table.entry_total.take(entries[0])]
        prior = self.table.prior
        if prior is not None:
            nobody = np.full_like(slot, PRIOR_KEY)
            part = self.slots.prior_part[self.slots.group[slot]]
            entries.append(_entries(prior, nobody, context, self.config.prior_orders, part))
            totals.append(prior.entry_total.take(entries[1]))
        entries.append(self.whole[slot, None])
        totals.append(self.table.entry_total.take(entries[-1]))
        # [F, O]
        entry, total = np.concatenate(entries, 1), np.concatenate(totals, 1)
        there = entry >= 0
        total = np.where(there, total, 0).astype(float)
        share = total * self.trust / (total + self.smoothing)
        # multiplied by the share that longer contexts leave
        share[:, 1:] *= (1 - share).cumprod(1)[:, :-1]
        pair = there.ravel().nonzero()[0]
        return pair, entry.take(pair), share.take(pair), np.maximum(total.take(pair), 1)

    def _successors(
        self, name: str, order: np.ndarray, entry: np.ndarray, absent: int
    ) -> np.ndarray:
        """[P, E]: a field of the entries' successors, in the table or in its prior."""
        if self.table.prior is None:
            return getattr(self.table, name).take(entry, 0)
        tables = getattr(self.table, name), getattr(self.table.prior, name)
        shape = entry.size, max(x.shape[1] for x in tables)
        values, of_prior = np.full(shape, absent, tables[0].dtype), self.of_prior[order]
        for x, of_table in zip(tables, (~of_prior, of_prior), strict=True):
            values[of_table, : x.shape[1]] = x[entry[of_table]]
        return values

    def _coupled(
        self,
        slot: np.ndarray,  # [P]
        order: np.ndarray,  # [P]
        weight: np.ndarray,  # [P, E] float64
        total: np.ndarray,  # [P]
        sources: np.ndarray,  # [P, E]
        g: np.ndarray,  # [P, E]
    ) -> np.ndarray:
        """[P, E]: p_n(t) of each successor, for slots that sample."""
        config, beta = self.config, self.betas[order]
        own = (sources >> self.bit[slot][:, None]) & 1 == 1
        mine = np.where(own, weight * config.own_weight, weight)
        seen = weight.sum(1)
        scale = seen / (np.maximum(mine.sum(1), 1) * total)
        rest = np.log(np.maximum(1 - seen / total, TAIL)) + EULER_GAMMA
        mine *= scale[:, None]
        score = np.exp((np.log(mine) + g) * beta[:, None])
        norm = score.sum(1) + np.exp(rest * beta)
        return ((1 - config.uncoupled) / norm)[:, None] * score + config.uncoupled * mine

    def _gumbel(self, key: np.ndarray, depth: int) -> np.ndarray:
        """Gumbel noise [n] of children at `depth`; key: [n], slot << 31 | token."""
        slot, token = key >> 31, key & ((1 << 31) - 1)
        # the token of a node at depth d is generated token d - 1 from here
        position = self.slots.generated[slot] + (depth - 1)
        if self.noise is not None:
            coordinates = (torch.from_numpy(x) for x in (slot, position, token[:, None]))
            return self.noise(*coordinates).numpy()[:, 0]
        keyed = self.slots.key[slot], token, position, self.slots.sample[slot], SAMPLE
        return gumbel_words(philox_words(*keyed))

    def _source(self, sources: np.ndarray, slot: np.ndarray) -> np.ndarray:
        own = (sources >> self.bit[slot]) & 1 == 1
        any_sample = sources & ((1 << PROMPT_BIT) - 1) != 0
        earlier = np.where((sources >> PROMPT_BIT) & 1 == 1, PROMPT, HISTORY)
        # only a group's successors have a source
        earlier = np.where(sources == 0, PRIOR, earlier)
        return np.where(own, OWN, np.where(any_sample, SIBLING, earlier))


def _entries(
    table: Any,
    owner: np.ndarray,  # [F] int64
    context: np.ndarray,  # [F, N]
    orders: tuple[int, ...],
    part: np.ndarray | None = None,  # [F], of the table; by default its only one
) -> np.ndarray:
    """[F, O]: entries of the contexts of all orders, longest first, -1 where absent."""
    orders, N = orders[::-1], table.entry_tokens.shape[1]
    context = context[:, :N]
    code = hash_contexts(owner, context, orders)
    _, inside = order_masks(orders, context.shape[1])
    tokens = np.where(inside, context[:, None, :], -1).reshape(code.size, -1)
    # a table may hold longer contexts than the slots keep
    tokens = np.pad(tokens, ((0, 0), (0, N - tokens.shape[1])), constant_values=-1)
    parts = 0 if part is None else part.repeat(len(orders))
    entry = find_contexts(table, owner.repeat(len(orders)), tokens, code.ravel(), parts)
    return entry.reshape(code.shape)


def _likeliest(parent: np.ndarray, q: np.ndarray, parents: int) -> np.ndarray:
    """Indices of each parent's MAX_CHILDREN largest q, by parent; of equal q the earlier ones."""
    order = stable_order(parent << 24 | (ONE - q), parents << 24)
    return order[rank_in_run(starts(parent[order])) < MAX_CHILDREN]


Drafted = Nodes[np.ndarray]


def draft_pool(
    grow: Callable[[np.ndarray, int], Drafted | None], slots: Slots, rows: int, nodes: int | None
) -> Pool:
    """Returns the pool of the nodes that `grow(live slots, number of nodes)` drafts.

    nodes: most drafted nodes, by default as many as fit.
    """
    live = live_by_group(slots)
    max_drafted = rows - live.size if nodes is None else min(nodes, rows - live.size)
    drafted = None
    if live.size and max_drafted > 0:
        # a successor of weight 0 has a score of 0
        with np.errstate(divide="ignore"):
            drafted = grow(live, max_drafted)
    return pool_of(slots, rows, drafted)


def rank_in(slot: np.ndarray) -> np.ndarray:
    """Number of earlier elements with the same slot, for each element."""
    order = slot.argsort(kind="stable")
    rank = np.empty_like(slot)
    rank[order] = rank_in_run(starts(slot[order]))
    return rank


def cheapest(levels: list[Drafted], budget: int) -> Drafted:
    """The `budget` cheapest nodes, cheapest first.

    Parents are indices among all nodes of `levels`, and in the result indices among its nodes.
    """
    nodes = Nodes(*(np.concatenate(x) for x in zip(*levels, strict=True)))
    # stable: equal (cost, slot) stay in order of depth, token and parent's rank
    order = stable_order(nodes.cost << 16 | nodes.slot, (MAX_COST + 1) << 16)
    if order.size >= MAX_NODES and budget >= MAX_NODES:
        order = order[rank_in(nodes.slot[order]) < MAX_NODES - 1]
    order = order[:budget]
    # a root's child has parent -1, so it reads the last element, -1
    position = np.full(nodes.cost.size + 1, -1)
    position[order] = np.arange(order.size)
    nodes = Nodes(*(x[order] for x in nodes))
    return nodes._replace(parent=position[nodes.parent])


def draft_tree_ref(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: DraftNoise | None = None,
    nodes: int | None = None,
) -> Pool:
    """Returns the step's pool of `rows` rows.

    rows: at least the number of live slots. nodes: most drafted nodes, by default as many as fit.

    noise(slot [F], position [F], token [F, W]) returns g [F, W] float64 in place of the slots'
    keyed noise, for replaying recorded samples.
    """
    state = Estimates(table, slots, config, noise)
    penalty = slot_penalties(slots, config.group_penalty).numpy(force=True)
    return draft_pool(partial(_grow, state, penalty), slots, rows, nodes)


def _grow(state: Estimates, penalty: np.ndarray, slot: np.ndarray, budget: int) -> Drafted | None:
    """The `budget` cheapest nodes of the slots' trees, cheapest first; None if there are none."""
    config, slots = state.config, state.slots
    budget = min(budget, (MAX_NODES - 1) * slot.size)
    limit = np.minimum(slots.max_new - 1 - slots.generated, min(config.max_depth, MAX_DEPTH))
    path = max_path_cost(config) + penalty
    # nodes dearer than the budget's last one so far cannot enter the pool
    ceiling = MAX_COST
    # costs include penalties until the pool's nodes are selected
    cost, parent, context = penalty[slot], np.full_like(slot, -1), slots.context[slot]
    levels: list[Drafted] = []
    count, depth = 0, 0
    while True:
        depth += 1
        room = limit[slot] >= depth
        if not room.all():
            slot, cost, parent, context = slot[room], cost[room], parent[room], context[room]
        if not slot.size:
            break
        children = state.children(slot, context, depth, np.minimum(path[slot], ceiling) - cost)
        if children is None or not children.parent.size:
            break
        total = cost[children.parent] + children.edge
        order = stable_order(total << 31 | children.token, (MAX_COST + 1) << 31)
        total = total[order]
        above, token, source = (
            x[order] for x in (children.parent, children.token, children.source)
        )
        slot = slot[above]
        ceiling = min(ceiling, _threshold(levels, total, slot, budget))
        cut = total.searchsorted(ceiling, "right")
        above, depths = above[:cut], np.full(cut, depth)
        levels.append(
            Nodes(total[:cut], token[:cut], slot[:cut], depths, parent[above], source[:cut])
        )
        # a child costs more than its parent by at least the level's cost
        front = np.arange(total.searchsorted(ceiling - state.level_cost.min(), "right"))
        if front.size > config.frontier:
            front = front[rank_in(slot[front]) < config.frontier]
        slot, cost = slot[front], total[front]
        context = np.column_stack([token[front].astype(np.int32), context[above[front], :-1]])
        parent = front + count
        count += above.size
    if not levels:
        return None
    nodes = cheapest(levels, budget)
    return nodes._replace(cost=nodes.cost - penalty[nodes.slot])


def _threshold(levels: list[Drafted], cost: np.ndarray, slot: np.ndarray, budget: int) -> int:
    """Cost of the pool's last node if it had only the nodes of `levels` and those given."""
    cost = np.concatenate([*(n.cost for n in levels), cost])
    if cost.size < budget:
        return MAX_COST
    if budget >= MAX_NODES:
        slot = np.concatenate([*(n.slot for n in levels), slot])
        if np.bincount(slot).max() >= MAX_NODES:
            order = cost.argsort(kind="stable")
            cost = cost[order[rank_in(slot[order]) < MAX_NODES - 1]]
            if cost.size < budget:
                return MAX_COST
    return int(np.partition(cost, budget - 1)[budget - 1])
