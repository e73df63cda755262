"""Children of a level's nodes, estimated in numpy by the formulas of `csd/kernels/draft_tree/`.

For the few elements of a level the overhead of a numpy call exceeds its work, so a level takes a
fixed number of calls over all slots, on flat lists of the existing contexts and of their
successors, without padding.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from csd.kernels.draft_tree.constants import (
    EULER_GAMMA,
    ONE,
    TAIL,
    UNIT,
    DraftNoise,
    level_cost,
)
from csd.kernels.graph_lookup import find_contexts, hash_contexts, order_masks
from csd.kernels.noise import SAMPLE, gumbel_words, philox_words
from csd.kernels.sorted_runs import rank_in_run, stable_order, starts
from csd.state.context_table import ANY, PROMPT_BIT, SAMPLE_BITS, GraphConfig, Table
from csd.state.pool import HISTORY, MAX_CHILDREN, OWN, PROMPT, SIBLING


class Children(NamedTuple):
    """Children of all nodes of a level [n]; those of one slot and token are in order of parents."""

    parent: np.ndarray  # index in the level
    token: np.ndarray
    edge: np.ndarray  # cost of the edge
    source: np.ndarray


class Estimates:
    """Table, noise and slots' fields from which children are estimated, as numpy arrays."""

    live: np.ndarray
    group: np.ndarray
    group_key: np.ndarray
    key: np.ndarray
    sample: np.ndarray
    generated: np.ndarray
    step: np.ndarray
    progress_penalty: np.ndarray
    max_new: np.ndarray
    temperature: np.ndarray
    context: np.ndarray
    stop_ids: np.ndarray
    prompt_len: np.ndarray

    def __init__(self, table: Table, slots: Any, config: GraphConfig, noise: DraftNoise | None):
        self.table, self.config, self.noise = table.arrays(), config, noise
        for name in Estimates.__annotations__:
            setattr(self, name, getattr(slots, name).numpy(force=True))
        self.stop_ids = self.stop_ids[:, (self.stop_ids >= 0).any(0)]
        self.sampled = self.temperature > 0
        self.bit = self.sample % SAMPLE_BITS
        self.level_cost = level_cost(config, self.generated, self.step)
        self.betas = np.array(config.betas)
        self.owner = self.group_key[self.group]
        _, self.inside = order_masks(config.orders[::-1], self.context.shape[1])
        # the group as a whole is a context of every node
        whole = np.full_like(self.context, -1)
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
        table, F, E = self.table, slot.size, self.table.succ_token.shape[1]
        pair, entry, share, total = self._contexts(slot, context)
        if not pair.size:
            return None
        node, order = np.divmod(pair, len(self.betas))
        # [P, E]
        token = table.succ_token.take(entry, 0)
        weight = table.succ_weight.take(entry, 0).astype(float)
        sources = table.succ_source.take(entry, 0)

        # all successors, sorted by slot, token, node and order, longest first
        held = (token >= 0).ravel().nonzero()[0]
        pair = held // E
        key = (slot << 31)[node[pair]] | token.ravel()[held]
        by = stable_order(key, self.live.size << 31)
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
        at = first.nonzero()[0]
        q = np.minimum(np.add.reduceat(mass, at), ONE)
        parent, held = node[pair[at]], held[at]
        edge = np.floor(-np.log(np.maximum(q, 1) * (1 / ONE)) * UNIT + 0.5).astype(np.int64)
        edge += self.level_cost[slot[parent]]
        kept = ((edge <= highest[parent]) & (q > 0)).nonzero()[0]
        if kept.size > MAX_CHILDREN:
            kept = kept[_likeliest(parent[kept], q[kept], F)]
        parent, token = parent[kept], token.ravel()[held[kept]]
        if self.stop_ids.size:
            open_ = ~(token[:, None] == self.stop_ids[slot[parent]]).any(1)
            parent, token, kept = parent[open_], token[open_], kept[open_]
        source = self._source(sources.ravel()[held[kept]], slot[parent])
        return Children(parent, token, edge[kept], source)

    def _contexts(
        self, slot: np.ndarray, context: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Finds the P contexts that are in the table, by node, longest first.

        Returns node * O + order, entry, share of the estimate, and total, each [P].
        """
        config, owner, F = self.config, self.owner[slot], slot.size
        orders = config.orders[::-1]
        code = hash_contexts(owner, context, orders)
        tokens = np.where(self.inside, context[:, None, :], -1).reshape(code.size, -1)
        entry = np.empty((F, len(orders) + 1), np.int64)
        found = find_contexts(self.table, owner.repeat(len(orders)), tokens, code.ravel())
        entry[:, :-1] = found.reshape(code.shape)
        entry[:, -1] = self.whole[slot]
        there = entry >= 0
        total = np.where(there, self.table.entry_total.take(entry), 0).astype(float)
        share = total * config.trust / (total + float(config.smoothing))
        # multiplied by the share that longer contexts leave
        share[:, 1:] *= (1 - share).cumprod(1)[:, :-1]
        pair = there.ravel().nonzero()[0]
        return pair, entry.take(pair), share.take(pair), np.maximum(total.take(pair), 1)

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
        position = self.generated[slot] + (depth - 1)
        if self.noise is not None:
            at = (torch.from_numpy(x) for x in (slot, position, token[:, None]))
            return self.noise(*at).numpy()[:, 0]
        return gumbel_words(
            philox_words(self.key[slot], token, position, self.sample[slot], SAMPLE)
        )

    def _source(self, sources: np.ndarray, slot: np.ndarray) -> np.ndarray:
        own = (sources >> self.bit[slot]) & 1 == 1
        any_sample = sources & ((1 << PROMPT_BIT) - 1) != 0
        earlier = np.where((sources >> PROMPT_BIT) & 1 == 1, PROMPT, HISTORY)
        return np.where(own, OWN, np.where(any_sample, SIBLING, earlier))


def _likeliest(parent: np.ndarray, q: np.ndarray, parents: int) -> np.ndarray:
    """Indices of each parent's MAX_CHILDREN largest q, by parent; of equal q the earlier ones."""
    order = stable_order(parent << 24 | (ONE - q), parents << 24)
    return order[rank_in_run(starts(parent[order])) < MAX_CHILDREN]
