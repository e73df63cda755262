"""Insert the observations of a step or a prompt into the consensus graph.

Row r observed the successors `succ_token[r]` with weights `succ_weight[r]` after its context. It
updates its contexts of all `orders` (those it has enough tokens for), so a call has R * O keys.
With the table as it was before the call:

1. Keys of equal hash are one context; its leader is the first of them in (row, order) order. A key
   whose group or tokens differ from its leader's (a collision of the hash) is dropped.
2. A leader whose context is in the table touches its entry.
3. The other leaders of one bucket, in order, take its replaceable entries: first the empty and
   dead ones by place, then the live ones that this call has not touched, by smallest total, then
   by oldest touch, then by place. A leader for which none is left is dropped.
4. A touched context's successors become

       w(t) = old w(t) + sum of the call's weights on t,    the E heaviest, ties to smaller tokens

   with the sources of both, and its total grows by its rows' totals. If the total exceeds
   MAX_TOTAL, total and weights are halved, rounding down, and successors of weight 0 are removed.

The result does not depend on the order of execution. The sum of the call's weights on one context,
and that of its totals, must stay below 2^30.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from csd.kernels.common.operator import RecordOperator, launcher
from csd.kernels.table.reference import graph_insert_ref
from csd.kernels.table.rows import OBSERVED, TABLE, Observed
from csd.state.context_table import Table
from csd.state.record import check_tensor, on_host

__all__ = ["graph_insert", "graph_insert_ref", "graph_insert_triton", "insert_observed_triton"]


@launcher
def graph_insert_triton() -> Callable:
    from csd.kernels.table.triton.launch import graph_insert_triton

    return graph_insert_triton


@launcher
def insert_observed_triton() -> Callable:
    from csd.kernels.table.triton.launch import insert_observed_triton

    return insert_observed_triton


def on_table(run: Callable) -> Callable:
    @wraps(run)
    def call(table: Any, ways: int, *rows_and_orders: Any) -> None:
        *rows, orders = rows_and_orders
        run(Table(ways, **vars(table)), *rows, tuple(orders))

    return call


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.table.cpu.insert import graph_insert

    return (lambda table, ways, *rows_and_orders: on_host(table.step)), on_table(graph_insert)


_graph_insert = RecordOperator(
    "graph_insert",
    (
        TABLE,
        "SymInt ways",
        *(f"Tensor observed_{name}" for name in OBSERVED.names),
        "Tensor live_groups",
        "SymInt[] orders",
    ),
    on_table(graph_insert_ref),
    on_table(graph_insert_triton),
    loop=_loop,
)


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
    """Updates `table` in place with the successors that R rows have observed."""
    device = group_key.device
    sizes: dict[str, int] = {}
    _graph_insert.check(sizes, device, table)
    N = sizes["N"]
    rows = (group_key, context, succ_token, succ_weight, row_total, source_bit)
    OBSERVED.check(Observed(*rows), {"N": N}, device, prefix="", any_layout=True)
    check_tensor("live_groups", live_groups, (None,), torch.int64, device, any_layout=True)
    if not orders or max(orders) > N or min(orders) < 1:
        raise ValueError(f"orders must lie in 1 to {N}, the table's context, got {orders}")
    _graph_insert(table, table.ways, *rows, live_groups, list(orders))
