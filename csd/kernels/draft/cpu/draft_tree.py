"""Drafting of all slots' trees in one call; the definition is in `csd/kernels/draft`."""

import numpy as np

from csd.kernels.draft.constants import POOL, SLOTS, level_cost, max_path_cost
from csd.kernels.draft.cpu.grow import Graph, cheapest, grow
from csd.kernels.draft.cpu.pools import fill, root_positions, slot_penalties
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import require
from csd.kernels.table.cpu.lookup import order_sizes
from csd.kernels.table.lookup import ENTRIES
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool
from csd.state.pool_builder import allocate_pool, live_by_group
from csd.state.record import on_host
from csd.state.slots import Slots


@loop
def _draft(live, max_drafted, group_penalty, level, limits, graph, slots, position, pool):
    """Grows the trees of the slots `live`; writes at most `max_drafted` nodes to a pool."""
    penalty, L = slot_penalties(live, slots, group_penalty), live.shape[0]
    budget = max(min(max_drafted, (MAX_NODES - 1) * L), 0)
    node, context, count = grow(live, budget, penalty, level, limits, graph, slots)
    chosen = cheapest(node, L, count, penalty.shape[0])[:budget]
    fill(live, chosen, node, context, penalty, slots.group, position, pool)


def draft_tree(
    table: Table, slots: Slots, rows: int, config: GraphConfig, nodes: int | None = None
) -> Pool:
    """Drafts trees and returns them as a pool of `rows` rows; see `draft_tree_ref`."""
    require(on_host(slots.live, table.step), "draft_tree", slots.live, table.step)
    live, of_slots = live_by_group(slots), SLOTS.arrays(slots)
    max_drafted = rows - live.size if nodes is None else min(nodes, rows - live.size)
    pool = allocate_pool(slots, rows)
    # without a prior, an order of none is looked up in the groups' table
    prior, prior_orders = table.prior or table, () if table.prior is None else config.prior_orders
    entries = ENTRIES.arrays(table)
    betas = [*config.betas[:-1], *config.prior_betas[: len(prior_orders)], config.betas[-1]]
    graph = Graph(
        (entries, entries if prior is table else ENTRIES.arrays(prior)),
        (config.ways, prior.ways, prior.buckets * prior.ways),
        (order_sizes(config.orders), order_sizes(prior_orders)),
        np.array(betas),
        (
            float(config.smoothing),
            config.trust,
            config.own_weight,
            config.uncoupled,
            float(config.prior_smoothing),
            config.prior_trust,
        ),
    )
    _draft(
        live,
        max_drafted,
        config.group_penalty,
        level_cost(config, of_slots.generated, of_slots.step),
        (max_path_cost(config), min(config.max_depth, MAX_DEPTH), config.frontier),
        graph,
        of_slots,
        root_positions(slots),
        POOL.arrays(pool),
    )
    return pool
