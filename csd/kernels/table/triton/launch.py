"""The four launches of an insert, and the buffers between them.

A step's rows are observed and claimed by one launch; a prompt's rows are only claimed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from csd.kernels.table.lookup import hash_factors
from csd.kernels.table.rows import Observed, observed_rows
from csd.kernels.table.triton.claim import _claim_kernel, _lead_kernel
from csd.kernels.table.triton.merge import _allocate_kernel, _merge_kernel
from csd.kernels.table.triton.observe import _observe_claim_kernel, observe_arguments
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
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


@dataclass(frozen=True, slots=True)
class _Claimed:
    """Hashes and entries [K] of the keys of R rows, and block sizes and grid of their kernels."""

    code: torch.Tensor
    entry: torch.Tensor
    orders: tuple[int, ...]
    rows: int

    @classmethod
    def empty(cls, rows: int, orders: tuple[int, ...], device: torch.device) -> "_Claimed":
        K = rows * len(orders)
        code = torch.empty(K, dtype=torch.int64, device=device)
        return cls(code, torch.empty(K, dtype=torch.int32, device=device), tuple(orders), rows)

    @property
    def block_o(self) -> int:
        return triton.next_power_of_2(len(self.orders))

    @property
    def block_r(self) -> int:
        return max(1, BLOCK_K // self.block_o)

    @property
    def grid(self) -> tuple[int]:
        return (max(1, triton.cdiv(self.rows, self.block_r)),)

    def arguments(self, table: Table, N: int) -> dict[str, Any]:
        return dict(
            entry_group_ptr=table.entry_group,
            entry_hash_ptr=table.entry_hash,
            entry_tokens_ptr=table.entry_tokens,
            code_ptr=self.code,
            entry_ptr=self.entry,
            buckets=table.buckets,
            ORDERS=self.orders,
            BLOCK_O=self.block_o,
            HASH=hash_factors(N),
            WAYS=table.ways,
            BLOCK_R=self.block_r,
            num_warps=4,
        )


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
    R, N = context.shape
    tensors = (group_key, context, succ_token, succ_weight, row_total, source_bit)
    rows = Observed(*(x.contiguous() for x in tensors))
    claimed = _Claimed.empty(R, orders, context.device)
    _claim_kernel[claimed.grid](
        group_key_ptr=rows.group_key,
        context_ptr=rows.context,
        rows=R,
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        **claimed.arguments(table, N),
    )
    _merge_claimed(table, rows, claimed, live_groups.contiguous())


def insert_observed_triton(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig
) -> None:
    """Runs `observe` and `graph_insert` of its rows, in four launches."""
    rows = observed_rows(pool, slots)
    R, N = rows.context.shape
    claimed = _Claimed.empty(R, config.orders, rows.context.device)
    _observe_claim_kernel[claimed.grid](
        **observe_arguments(pool, slots, verdict, config, rows), **claimed.arguments(table, N)
    )
    _merge_claimed(table, rows, claimed, slots.group_key)


def _merge_claimed(
    table: Table, rows: Observed, claimed: _Claimed, live_groups: torch.Tensor
) -> None:
    """Runs the other three launches: lead, allocate and merge."""
    (K,), N = claimed.code.shape, rows.context.shape[1]
    U, E = rows.succ_token.shape[1], table.succ_token.shape[1]
    device = claimed.code.device
    # each begins at a multiple of 16 bytes for any K, since kernels are specialised on that
    want, slot_of, start, count, total, bit = torch.empty(
        (6, 4 * triton.cdiv(K, 4)), dtype=torch.int32, device=device
    )
    update_token, update_weight = torch.empty(
        (2, 4 * triton.cdiv(K * U, 4)), dtype=torch.int32, device=device
    )
    now = torch.empty(1, dtype=torch.int32, device=device)
    block_o, block_n = claimed.block_o, triton.next_power_of_2(N)
    programs = max(1, triton.cdiv(K, BLOCK_K))
    _lead_kernel[(programs,)](
        group_key_ptr=rows.group_key,
        context_ptr=rows.context,
        succ_token_ptr=rows.succ_token,
        succ_weight_ptr=rows.succ_weight,
        row_total_ptr=rows.row_total,
        source_bit_ptr=rows.source_bit,
        code_ptr=claimed.code,
        entry_ptr=claimed.entry,
        step_ptr=table.step,
        entry_stamp_ptr=table.entry_stamp,
        want_ptr=want,
        place_ptr=slot_of,
        start_ptr=start,
        count_ptr=count,
        update_token_ptr=update_token,
        update_weight_ptr=update_weight,
        update_total_ptr=total,
        update_bit_ptr=bit,
        now_ptr=now,
        keys=K,
        buckets=table.buckets,
        ORDERS=claimed.orders,
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
        place_ptr=slot_of,
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
        group_key_ptr=rows.group_key,
        context_ptr=rows.context,
        code_ptr=claimed.code,
        want_ptr=want,
        place_ptr=slot_of,
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
        ORDERS=claimed.orders,
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
