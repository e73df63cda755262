"""The four launches of an insert, and the buffers between them.

A step's rows are observed and claimed by one launch; a prompt's rows are only claimed.
"""

from typing import Any

import torch
import triton

from csd.kernels.table.lookup import hash_factors
from csd.kernels.table.rows import TABLE, Observed, observed_rows
from csd.kernels.table.triton.claim import Contexts, Keys, claim_kernel, lead_kernel
from csd.kernels.table.triton.merge import allocate_kernel, merge_kernel
from csd.kernels.table.triton.observe import observe_arguments, observe_claim_kernel
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.record import allocate
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# keys per program, and keys that it compares them with at once
BLOCK_K = 16
BLOCK_J = 512
LEAD_WARPS = 8
# successors that a program merges at once, and successors that it compares them with at once: with
# more of the latter a sum is left in all lanes in place of one each, with fewer there are more
# iterations
MERGE, MERGE_J, MERGE_WARPS = 32, 8, 1


def graph_insert_triton(
    table: Table,
    group_key: torch.Tensor,
    context: torch.Tensor,
    succ_token: torch.Tensor,
    succ_weight: torch.Tensor,
    row_total: torch.Tensor,
    source_bit: torch.Tensor,
    live_groups: torch.Tensor,
    orders: tuple[int, ...],
) -> None:
    """Four launches for any number of rows."""
    tensors = (group_key, context, succ_token, succ_weight, row_total, source_bit)
    rows = Observed(*(x.contiguous() for x in tensors))
    grid, claim = _claim(table, rows, orders)
    claim_kernel[grid](rows=rows, R=context.shape[0], **claim)
    _merge_claimed(table, rows, claim["keys"], claim["C"], live_groups.contiguous())


def insert_observed_triton(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig
) -> None:
    """Runs `observe` and `graph_insert` of its rows, in four launches."""
    rows = observed_rows(pool, slots)
    grid, claim = _claim(table, rows, config.orders)
    observe_claim_kernel[grid](**observe_arguments(pool, slots, verdict, config, rows), **claim)
    _merge_claimed(table, rows, claim["keys"], claim["C"], slots.group_key)


def _claim(
    table: Table, rows: Observed, orders: tuple[int, ...]
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid of the first launch, and its arguments that do not depend on where rows come from."""
    (R, N), U = rows.context.shape, rows.succ_token.shape[1]
    block_o = triton.next_power_of_2(len(orders))
    block_r = max(1, BLOCK_K // block_o)
    claim = dict(
        table=TABLE(table),
        keys=Keys(**allocate(Keys, {"K": R * len(orders), "U": U}, rows.context.device)),
        buckets=table.buckets,
        C=Contexts(
            N=N,
            BLOCK_N=triton.next_power_of_2(N),
            ORDERS=tuple(orders),
            BLOCK_O=block_o,
            HASH=hash_factors(N),
            WAYS=table.ways,
        ),
        BLOCK_R=block_r,
        num_warps=4,
    )
    return (max(1, triton.cdiv(R, block_r)),), claim


def _merge_claimed(
    table: Table, rows: Observed, keys: Keys, contexts: Contexts, live_groups: torch.Tensor
) -> None:
    """Runs the other three launches: lead, allocate and merge."""
    (K, U), E = keys.token.shape, table.succ_token.shape[1]
    of_table = TABLE(table)
    programs = max(1, triton.cdiv(K, BLOCK_K))
    lead_kernel[(programs,)](
        rows=rows,
        table=of_table,
        keys=keys,
        K=K,
        buckets=table.buckets,
        C=contexts,
        U=U,
        BLOCK_U=triton.next_power_of_2(U),
        BLOCK_K=BLOCK_K,
        BLOCK_J=BLOCK_J,
        num_warps=LEAD_WARPS,
    )
    allocate_kernel[(programs,)](
        table=of_table,
        keys=keys,
        live_groups_ptr=live_groups,
        K=K,
        G=live_groups.shape[0],
        WAYS=table.ways,
        BLOCK_K=BLOCK_K,
        BLOCK_J=BLOCK_J,
        BLOCK_G=16,
        num_warps=4,
    )
    block_e = triton.next_power_of_2(max(2, E))
    merge_kernel[(max(1, K),)](
        rows=rows,
        table=of_table,
        keys=keys,
        K=K,
        C=contexts,
        U=U,
        E=E,
        BLOCK_E=block_e,
        BLOCK=max(MERGE, block_e),
        BLOCK_J=MERGE_J,
        num_warps=MERGE_WARPS,
    )
