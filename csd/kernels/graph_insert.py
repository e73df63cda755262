"""Insert what a step or a prompt has shown into the consensus graph.

Row r observed the successors `succ_token[r]` with weights `succ_weight[r]` after its context. It
updates its contexts of all `orders` (those it has enough tokens for), so a call makes R * O keys.
With the table as it was before the call:

1. Keys of equal hash are one context; its leader is the first of them in (row, order) order. A key
   whose group or tokens differ from its leader's (a collision of the hash) is dropped.
2. A leader whose context is in the table touches its entry.
3. The other leaders of one bucket, in order, take its replaceable entries: first the empty and
   dead ones by place, then the live ones that this call has not touched, the lightest total first,
   then the one touched longest ago, then by place. A leader that finds none left is dropped.
4. A touched context's successors become

       w(t) = old w(t) + sum of the call's weights on t,    the E heaviest, ties to smaller tokens

   with the sources of both, its total grows by its rows' totals, and when the total passes
   MAX_TOTAL total and weights are halved, rounding down, and successors of weight 0 leave.

Nothing depends on the order of execution. The call's weights on one context, and its totals, must
stay below 2^30 together.
"""

from dataclasses import fields
from typing import Any

import torch
import triton

from csd.graph.table import GraphConfig, Table
from csd.kernels.aot import DEEP, SHALLOW, Job, Shape
from csd.kernels.checks import check_fields, check_tensor
from csd.kernels.graph_insert_kernel import _allocate_kernel, _claim_kernel, _lead_kernel
from csd.kernels.graph_insert_ref import graph_insert_ref
from csd.kernels.graph_lookup_kernel import hash_factors
from csd.kernels.graph_merge_kernel import _merge_kernel

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
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK=MERGE,
        BLOCK_J=MERGE_J,
        num_warps=MERGE_WARPS,
    )


_TABLE = tuple(f.name for f in fields(Table) if f.name != "ways")


@torch.library.custom_op("csd::graph_insert", mutates_args=_TABLE, device_types="cpu")
def _graph_insert(
    entry_group: torch.Tensor,
    entry_hash: torch.Tensor,
    entry_tokens: torch.Tensor,
    entry_total: torch.Tensor,
    entry_stamp: torch.Tensor,
    succ_token: torch.Tensor,
    succ_weight: torch.Tensor,
    succ_source: torch.Tensor,
    step: torch.Tensor,
    dropped: torch.Tensor,
    ways: int,
    group_key: torch.Tensor,
    context: torch.Tensor,
    token: torch.Tensor,
    weight: torch.Tensor,
    row_total: torch.Tensor,
    source_bit: torch.Tensor,
    live_groups: torch.Tensor,
    orders: list[int],
) -> None:
    table = Table(
        ways, entry_group, entry_hash, entry_tokens, entry_total, entry_stamp, succ_token,
        succ_weight, succ_source, step, dropped,
    )  # fmt: skip
    rows = (group_key, context, token, weight, row_total, source_bit)
    graph_insert_ref(table, *rows, live_groups, tuple(orders))


@_graph_insert.register_kernel("cuda")
def _(*args: Any) -> None:
    tensors, (ways, *rows, orders) = args[: len(_TABLE)], args[len(_TABLE) :]
    with torch.cuda.device_of(tensors[0]):
        insert: Any = graph_insert_triton
        insert(Table(ways, *tensors), *rows, tuple(orders))


@_graph_insert.register_fake
def _(*args: Any) -> Any:
    return None


def graph_insert(
    table: Table,
    group_key: torch.Tensor,  # [R] int64, -1: skip the row
    context: torch.Tensor,  # [R, N] int32, latest first, -1 before the start
    succ_token: torch.Tensor,  # [R, U] int32, -1 is none
    succ_weight: torch.Tensor,  # [R, U] int32, 0 is none
    row_total: torch.Tensor,  # [R] int32, at least the row's sum of weights
    source_bit: torch.Tensor,  # [R] int32
    live_groups: torch.Tensor,  # [G] int64, -1 is none
    orders: tuple[int, ...],
) -> None:
    """Updates `table` in place with the successors that R rows have seen."""
    device = group_key.device
    sizes: dict[str, int] = {}
    check_fields("table", table, _TABLE, sizes, device)
    N = sizes["N"]
    for name, x, shape, dtype in (
        ("group_key", group_key, (None,), torch.int64),
        ("context", context, (*group_key.shape, N), torch.int32),
        ("succ_token", succ_token, (*group_key.shape, None), torch.int32),
        ("succ_weight", succ_weight, succ_token.shape, torch.int32),
        ("row_total", row_total, group_key.shape, torch.int32),
        ("source_bit", source_bit, group_key.shape, torch.int32),
        ("live_groups", live_groups, (None,), torch.int64),
    ):
        check_tensor(name, x, shape, dtype, device, any_layout=True)
    if not orders or max(orders) > N or min(orders) < 1:
        raise ValueError(f"orders must lie in 1 to {N}, the table's context, got {orders}")
    rows = (group_key, context, succ_token, succ_weight, row_total, source_bit, live_groups)
    _graph_insert(*(getattr(table, name) for name in _TABLE), table.ways, *rows, list(orders))


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    jobs = _jobs(GraphConfig())
    for config in (SHALLOW, DEEP):
        # room is given out in the same way whatever the contexts
        claim, lead, _allocate, merge = _jobs(config)
        jobs += [claim, lead, merge]
    return jobs


def _jobs(config: GraphConfig) -> list[Job]:
    """A step's nine successors a row."""
    orders, N, O, E = config.orders, config.context, len(config.orders), config.successors
    block_o = triton.next_power_of_2(O)
    long = (
        "group_key", "code", "entry_group", "entry_hash", "live_groups", "dropped", "succ_source",
    )  # fmt: skip
    counts = ("rows", "buckets", "keys", "groups")
    constants = dict(
        N=N, BLOCK_N=N, ORDERS=orders, BLOCK_O=block_o, O=O, HASH=hash_factors(N),
        WAYS=config.ways, BLOCK_R=BLOCK_K // block_o, U=9, BLOCK_U=16, E=E, BLOCK_E=E,
        BLOCK_K=BLOCK_K, BLOCK_J=BLOCK_J, BLOCK_G=16, BLOCK=MERGE,
    )  # fmt: skip
    jobs = []
    for kernel, warps in (
        (_claim_kernel, 4), (_lead_kernel, LEAD_WARPS), (_allocate_kernel, 4),
        (_merge_kernel, MERGE_WARPS),
    ):  # fmt: skip
        args = {}
        for param in kernel.params:
            name = param.name.removesuffix("_ptr")
            if param.is_constexpr:
                args[param.name] = constants[name]
            elif name in counts:
                args[param.name] = "i32"
            else:
                args[param.name] = "*i64:16" if name in long else "*i32:16"
        if kernel is _merge_kernel:
            args["BLOCK_J"] = MERGE_J
        name = kernel.__name__.strip("_").removesuffix("_kernel")
        name = f"graph_insert {name} O={O}"
        jobs.append(Job(name=name, kernel=kernel, args=args, num_warps=warps))
    return jobs
