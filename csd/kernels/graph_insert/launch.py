"""The four launches of an insert, and what lies between them."""

import torch
import triton

from csd.kernels.graph_insert.allocate import _allocate_kernel
from csd.kernels.graph_insert.claim import _claim_kernel
from csd.kernels.graph_insert.lead import _lead_kernel
from csd.kernels.graph_insert.merge import _merge_kernel
from csd.kernels.graph_lookup import hash_factors
from csd.state.context_table import Table

# keys a program, and keys it compares them with at once
BLOCK_K = 16
BLOCK_J = 512
LEAD_WARPS = 8
# successors that a program merges at once, and those it compares them with at once
MERGE, MERGE_J, MERGE_WARPS = 32, 32, 1


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
    """Four launches, whatever the rows."""
    R, N = context.shape
    U, E = succ_token.shape[1], table.succ_token.shape[1]
    O, K = len(orders), R * len(orders)
    device = context.device
    group_key, context, succ_token, succ_weight, row_total, source_bit, live_groups = (
        x.contiguous()
        for x in (
            group_key, context, succ_token, succ_weight, row_total, source_bit, live_groups,
        )
    )  # fmt: skip
    code = torch.empty(K, dtype=torch.int64, device=device)
    # each begins at a multiple of 16 bytes whatever K is: kernels are specialised on that
    entry, want, place, start, count, total, bit = torch.empty(
        (7, 4 * triton.cdiv(K, 4)), dtype=torch.int32, device=device
    )
    update_token, update_weight = torch.empty(
        (2, 4 * triton.cdiv(K * U, 4)), dtype=torch.int32, device=device
    )
    now = torch.empty(1, dtype=torch.int32, device=device)
    block_o, block_n = triton.next_power_of_2(O), triton.next_power_of_2(N)
    block_r = max(1, BLOCK_K // block_o)
    _claim_kernel[(max(1, triton.cdiv(R, block_r)),)](
        group_key_ptr=group_key,
        context_ptr=context,
        entry_group_ptr=table.entry_group,
        entry_hash_ptr=table.entry_hash,
        entry_tokens_ptr=table.entry_tokens,
        code_ptr=code,
        entry_ptr=entry,
        rows=R,
        buckets=table.buckets,
        N=N,
        BLOCK_N=block_n,
        ORDERS=tuple(orders),
        BLOCK_O=block_o,
        HASH=hash_factors(N),
        WAYS=table.ways,
        BLOCK_R=block_r,
        num_warps=4,
    )
    programs = max(1, triton.cdiv(K, BLOCK_K))
    _lead_kernel[(programs,)](
        group_key_ptr=group_key,
        context_ptr=context,
        succ_token_ptr=succ_token,
        succ_weight_ptr=succ_weight,
        row_total_ptr=row_total,
        source_bit_ptr=source_bit,
        code_ptr=code,
        entry_ptr=entry,
        step_ptr=table.step,
        entry_stamp_ptr=table.entry_stamp,
        want_ptr=want,
        place_ptr=place,
        start_ptr=start,
        count_ptr=count,
        update_token_ptr=update_token,
        update_weight_ptr=update_weight,
        update_total_ptr=total,
        update_bit_ptr=bit,
        now_ptr=now,
        keys=K,
        buckets=table.buckets,
        ORDERS=tuple(orders),
        BLOCK_O=block_o,
        N=N,
        BLOCK_N=block_n,
        U=U,
        BLOCK_U=triton.next_power_of_2(U),
        BLOCK_K=BLOCK_K,
        BLOCK_J=BLOCK_J,
        num_warps=LEAD_WARPS,
    )
    _allocate_kernel[(programs,)](
        want_ptr=want,
        entry_group_ptr=table.entry_group,
        entry_total_ptr=table.entry_total,
        entry_stamp_ptr=table.entry_stamp,
        live_groups_ptr=live_groups,
        now_ptr=now,
        dropped_ptr=table.dropped,
        place_ptr=place,
        keys=K,
        groups=live_groups.shape[0],
        WAYS=table.ways,
        BLOCK_K=BLOCK_K,
        BLOCK_J=BLOCK_J,
        BLOCK_G=16,
        num_warps=4,
    )
    block_e = triton.next_power_of_2(max(2, E))
    _merge_kernel[(max(1, K),)](
        group_key_ptr=group_key,
        context_ptr=context,
        code_ptr=code,
        want_ptr=want,
        place_ptr=place,
        start_ptr=start,
        count_ptr=count,
        update_token_ptr=update_token,
        update_weight_ptr=update_weight,
        update_total_ptr=total,
        update_bit_ptr=bit,
        now_ptr=now,
        entry_group_ptr=table.entry_group,
        entry_hash_ptr=table.entry_hash,
        entry_tokens_ptr=table.entry_tokens,
        entry_total_ptr=table.entry_total,
        entry_stamp_ptr=table.entry_stamp,
        succ_token_ptr=table.succ_token,
        succ_weight_ptr=table.succ_weight,
        succ_source_ptr=table.succ_source,
        step_ptr=table.step,
        keys=K,
        ORDERS=tuple(orders),
        BLOCK_O=block_o,
        N=N,
        BLOCK_N=block_n,
        U=U,
        E=E,
        BLOCK_E=block_e,
        BLOCK=max(MERGE, block_e),
        BLOCK_J=MERGE_J,
        num_warps=MERGE_WARPS,
    )
