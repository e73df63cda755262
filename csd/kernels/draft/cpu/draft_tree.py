"""Drafting of all slots' trees in one call; the definition is in `csd/kernels/draft`."""

import numpy as np

from csd.kernels.draft.constants import POOL, SLOTS, DraftNoise, level_cost, max_path_cost
from csd.kernels.draft.cpu.grow import cheapest, grow
from csd.kernels.draft.cpu.pools import fill, root_positions, slot_penalties
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import require
from csd.kernels.table.cpu.lookup import order_sizes
from csd.kernels.table.lookup import ENTRIES
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool, empty_pool
from csd.state.pool_builder import live_by_group
from csd.state.record import on_host
from csd.state.slots import Slots


@loop
def _draft(
    live,
    max_drafted,
    rows,
    group_penalty,
    path,
    level,
    max_depth,
    frontier,
    tables,
    sizes,
    orders,
    betas,
    config,
    slots,
    position,
    pool,
):
    """Grows the trees of the slots `live`; writes at most `max_drafted` nodes to a pool."""
    penalty = slot_penalties(live, slots, group_penalty)
    depth = max_depth if live.shape[0] and max_drafted > 0 else 0
    budget = min(max_drafted, (MAX_NODES - 1) * live.shape[0])
    node, context, count = grow(
        live,
        budget,
        penalty,
        path,
        level,
        depth,
        frontier,
        tables,
        sizes,
        orders,
        betas,
        config,
        slots,
    )
    L = live.shape[0]
    chosen = cheapest(node, L, count, penalty.shape[0])[: max(budget, 0)]
    fill(live, chosen, node, context, penalty, slots.group, position, pool)


def draft_tree(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: DraftNoise | None = None,
    out: Pool | None = None,
    nodes: int | None = None,
) -> Pool:
    """Drafts trees and returns them as a pool of `rows` rows, `out` if given; see `draft_tree_ref`.

    noise must be None: only the reference takes it. nodes: most drafted nodes.
    """
    if noise is not None:
        raise ValueError("noise must be None with kernels='cpu'")
    require(on_host(slots.live, table.step), "draft_tree", slots.live, table.step)
    live, of_slots = live_by_group(slots), SLOTS.arrays(slots)
    max_drafted = rows - live.size if nodes is None else min(nodes, rows - live.size)
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    pool = out or empty_pool(rows, S, G, N, slots.live.device)
    # without a prior, an order of none is looked up in the groups' table
    prior, prior_orders = table.prior or table, () if table.prior is None else config.prior_orders
    entries = ENTRIES.arrays(table)
    betas = *config.betas[:-1], *config.prior_betas[: len(prior_orders)], config.betas[-1]
    _draft(
        live,
        max_drafted,
        rows,
        config.group_penalty,
        max_path_cost(config),
        level_cost(config, of_slots.generated, of_slots.step),
        min(config.max_depth, MAX_DEPTH),
        config.frontier,
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
        of_slots,
        root_positions(slots),
        POOL.arrays(pool),
    )
    return pool
