"""`observe`, and `graph_insert` of what it gives, in one call."""

import numpy as np

from csd.cpu.compiled import loop
from csd.cpu.graph_insert import graph_insert, insert_rows, table_tensors
from csd.cpu.lookup import order_sizes
from csd.cpu.numbers import LIKE, memory, on_host
from csd.cpu.observe import observe, observe_rows, observed_tensors
from csd.kernels.checks import FLOAT, INT, LONG
from csd.kernels.observe import SUCCESSORS
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

# of `observed_tensors` and `table_tensors`
DTYPES = (
    INT, INT, INT, INT, INT, LONG, INT, INT, INT, FLOAT, INT,
    LONG, LONG, INT, INT, INT, INT, INT, LONG, INT, LONG,
)  # fmt: skip
INTS, LONGS, FLOATS = np.empty(0, np.int32), np.empty(0, np.int64), LIKE[FLOAT]


@loop
def _insert_observed(
    at,  # addresses of `observed_tensors`
    to,  # addresses of `table_tensors`
    sizes,  # M, N, S, G, A, C, E, ways
    soft,
    hard,
    orders,  # [O]
):
    M, N, S, G, A, C, E, ways = sizes
    group_key = memory(at[5], G, LONGS)
    R, U = M + S, SUCCESSORS
    key, context = np.empty(R, np.int64), np.empty((R, N), np.int32)
    token, weight = np.empty((R, U), np.int32), np.empty((R, U), np.int32)
    total, bit = np.empty(R, np.int32), np.empty(R, np.int32)
    observe_rows(
        memory(at[0], M, INTS), memory(at[1], M, INTS), memory(at[2], (M, N), INTS),
        memory(at[3], S, INTS), memory(at[4], S, INTS), group_key, memory(at[6], S, INTS),
        memory(at[7], M, INTS), memory(at[8], (M, TOP), INTS), memory(at[9], (M, TOP), FLOATS),
        memory(at[10], (S, A), INTS), soft, hard, key, context, token, weight, total, bit,
    )  # fmt: skip
    # all rows are of groups in flight
    insert_rows(
        key, context, token, weight, total, bit, group_key, orders, ways,
        memory(to[0], C, LONGS), memory(to[1], C, LONGS), memory(to[2], (C, N), INTS),
        memory(to[3], C, INTS), memory(to[4], C, INTS), memory(to[5], (C, E), INTS),
        memory(to[6], (C, E), INTS), memory(to[7], (C, E), LONGS), memory(to[8], 1, INTS),
        memory(to[9], 1, LONGS),
    )  # fmt: skip


def insert_observed(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig
) -> None:
    """By the tensors' addresses: numpy's arrays of 21 take longer to make than to observe."""
    given, held = observed_tensors(pool, slots, verdict), table_tensors(table)
    tensors = (*given, *held)
    plain = on_host(*tensors) and all(
        x.dtype is dtype and x.is_contiguous() for x, dtype in zip(tensors, DTYPES, strict=True)
    )
    if not plain:
        # one after another
        seen = observe(pool, slots, verdict, config)
        graph_insert(table, *seen, slots.group_key, config.orders)
        return
    M, N = pool.context.shape
    C, E = table.succ_token.shape
    S, A = verdict.accept_row.shape
    _insert_observed(
        tuple([x.data_ptr() for x in given]), tuple([x.data_ptr() for x in held]),
        (M, N, S, slots.group_key.shape[0], A, C, E, table.ways), config.soft_weight,
        config.hard_weight, order_sizes(config.orders),
    )  # fmt: skip
