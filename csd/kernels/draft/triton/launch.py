"""The three launches of a draft: every slot's tree up to a cut and beyond it, then the pool."""

from functools import partial

import torch
import triton

from csd.kernels.draft.constants import max_path_cost
from csd.kernels.draft.triton.fill import _fill_kernel
from csd.kernels.draft.triton.grow import _grow_kernel
from csd.kernels.table.lookup import hash_factors
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
    grow = partial(
        _grow_kernel[(S,)],
        live_ptr=slots.live,
        group_ptr=slots.group,
        key_ptr=slots.key,
        sample_ptr=slots.sample,
        generated_ptr=slots.generated,
        step_ptr=slots.step,
        progress_penalty_ptr=slots.progress_penalty,
        max_new_ptr=slots.max_new,
        temperature_ptr=slots.temperature,
        context_ptr=slots.context,
        stop_ids_ptr=slots.stop_ids,
        group_key_ptr=slots.group_key,
        prior_part_ptr=slots.prior_part,
        entry_group_ptr=table.entry_group,
        entry_hash_ptr=table.entry_hash,
        entry_tokens_ptr=table.entry_tokens,
        entry_total_ptr=table.entry_total,
        succ_token_ptr=table.succ_token,
        succ_weight_ptr=table.succ_weight,
        succ_source_ptr=table.succ_source,
        prior_group_ptr=prior.entry_group,
        prior_hash_ptr=prior.entry_hash,
        prior_tokens_ptr=prior.entry_tokens,
        prior_total_ptr=prior.entry_total,
        prior_token_ptr=prior.succ_token,
        prior_weight_ptr=prior.succ_weight,
        prior_source_ptr=prior.succ_source,
        seen_ptr=seen,
        front_ptr=front,
        children_ptr=children,
        slots=S,
        rows=rows,
        max_drafted=max_drafted,
        buckets=table.buckets,
        prior_buckets=prior.buckets,
        max_depth=min(config.max_depth, MAX_DEPTH),
        max_cost=max_path_cost(config),
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
        num_warps=GROW_WARPS,
        # fused multiply-adds would draft other trees than the reference
        enable_fp_fusion=False,
    )
    grow(nodes_ptr=seen, RESUMED=False)
    grow(nodes_ptr=lists, RESUMED=True)
    fill_pool(lists, slots, pool, max_drafted, config.group_penalty)
    return pool


def fill_pool(
    lists: torch.Tensor, slots: Slots, pool: Pool, max_drafted: int, group_penalty: int = 0
) -> None:
    """Fills `pool` with the `max_drafted` cheapest nodes of all slots' sorted lists [S, MAX_NODES].

    One launch. group_penalty: that of `GraphConfig`, included in the costs in the lists.
    """
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    _fill_kernel[(max(S, G + 1),)](
        nodes_ptr=lists,
        live_ptr=slots.live,
        group_ptr=slots.group,
        generated_ptr=slots.generated,
        step_ptr=slots.step,
        progress_penalty_ptr=slots.progress_penalty,
        temperature_ptr=slots.temperature,
        slot_context_ptr=slots.context,
        prompt_len_ptr=slots.prompt_len,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        position_ptr=pool.position,
        ancestors_ptr=pool.ancestors,
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        context_ptr=pool.context,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        group_start_ptr=pool.group_start,
        slots=S,
        groups=G,
        rows=pool.token.shape[0],
        max_drafted=max_drafted,
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        GROUP_PENALTY=group_penalty,
        BLOCK_S=FILL_S,
        num_warps=FILL_WARPS,
    )
