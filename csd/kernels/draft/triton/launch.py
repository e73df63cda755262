"""The three launches of a draft: every slot's tree up to a cut and beyond it, then the pool."""

from functools import partial
from typing import Any

import torch
import triton

from csd.kernels.draft.constants import POOL, SLOTS, max_path_cost
from csd.kernels.draft.triton.fill import fill_kernel
from csd.kernels.draft.triton.grow import GrowConstants, grow_kernel
from csd.kernels.table.lookup import ENTRIES, hash_factors
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, Pool, empty_pool
from csd.state.slots import MAX_STOP_IDS, Slots

# slots read at once
BLOCK_S, FILL_S = 16, 64
GROW_WARPS, FILL_WARPS = 8, 4


def draft_tree_triton(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: None = None,
    out: Pool | None = None,
    nodes: int | None = None,
) -> Pool:
    """Three launches: every slot's tree up to a cut and beyond it, then the pool."""
    if noise is not None:
        raise ValueError("noise must be None: the kernel draws noise per slot itself")
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    E = table.succ_token.shape[1]
    device = slots.live.device
    pool = out or empty_pool(rows, S, G, N, device)
    max_drafted = rows if nodes is None else nodes
    seen, lists = torch.empty((2, S, MAX_NODES), dtype=torch.int64, device=device)
    block_n, block_f = triton.next_power_of_2(N), triton.next_power_of_2(config.frontier)
    prior = table.prior or table
    prior_orders = () if table.prior is None else config.prior_orders
    prior_e = prior.succ_token.shape[1]
    children = torch.empty((S, block_f * MAX_CHILDREN), dtype=torch.int64, device=device)
    front = torch.empty((S, block_f, block_n), dtype=torch.int32, device=device)
    pointers = SLOTS(slots)
    grow = partial(
        grow_kernel[(S,)],
        slots=pointers,
        table=ENTRIES(table),
        prior=ENTRIES(prior),
        seen_ptr=seen,
        front_ptr=front,
        children_ptr=children,
        S=S,
        rows=rows,
        max_drafted=max_drafted,
        buckets=table.buckets,
        prior_buckets=prior.buckets,
        max_depth=min(config.max_depth, MAX_DEPTH),
        max_cost=max_path_cost(config),
        C=GrowConstants(
            N=N,
            BLOCK_N=block_n,
            ORDERS=config.orders[::-1],
            BLOCK_O=triton.next_power_of_2(len(config.orders) + len(prior_orders) + 1),
            HASH=hash_factors(N),
            WAYS=table.ways,
            E=E,
            BLOCK_E=triton.next_power_of_2(max(E, prior_e)),
            PRIOR_ORDERS=prior_orders[::-1],
            PRIOR_N=prior.entry_tokens.shape[1],
            PRIOR_WAYS=prior.ways,
            PRIOR_E=prior_e,
            SMOOTHING=(float(config.smoothing), float(config.prior_smoothing)),
            TRUST=(config.trust, config.prior_trust),
            OWN_WEIGHT=float(config.own_weight),
            BETAS=(*config.betas[:-1], *config.prior_betas[: len(prior_orders)], config.betas[-1]),
            UNCOUPLED=config.uncoupled,
            LEVEL_COST=config.level_cost,
            SETTLE=config.settle,
            GROUP_PENALTY=config.group_penalty,
            FRONTIER=config.frontier,
            BLOCK_F=block_f,
            STOPS=MAX_STOP_IDS,
            BLOCK_S=BLOCK_S,
        ),
        num_warps=GROW_WARPS,
        # fused multiply-adds would draft other trees than the reference
        enable_fp_fusion=False,
    )
    grow(nodes_ptr=seen, RESUMED=False)
    grow(nodes_ptr=lists, RESUMED=True)
    fill_pool(lists, pointers, pool, max_drafted, config.group_penalty)
    return pool


def fill_pool(
    lists: torch.Tensor, slots: Any, pool: Pool, max_drafted: int, group_penalty: int = 0
) -> None:
    """Fills `pool` with the `max_drafted` cheapest nodes of all slots' sorted lists [S, MAX_NODES].

    One launch. slots: tensors of the view SLOTS. group_penalty: that of `GraphConfig`, included in
    the costs in the lists.
    """
    S, G, N = slots.live.shape[0], slots.group_key.shape[0], slots.context.shape[1]
    fill_kernel[(max(S, G + 1),)](
        nodes_ptr=lists,
        slots=slots,
        pool=POOL(pool),
        S=S,
        G=G,
        rows=pool.rows,
        max_drafted=max_drafted,
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        GROUP_PENALTY=group_penalty,
        BLOCK_S=FILL_S,
        num_warps=FILL_WARPS,
    )
