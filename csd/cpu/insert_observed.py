"""Observation of a step and insertion of the observed rows into the graph, in one call."""

import numpy as np

from csd.cpu.compiled import loop
from csd.cpu.graph_insert import TableTensors, graph_insert, insert_rows, table_tensors
from csd.cpu.graph_lookup import order_sizes
from csd.cpu.observe import ObservedTensors, observe, observe_rows, observed_tensors
from csd.cpu.tensor_access import LIKE, memory, on_host
from csd.kernels.checks import FLOAT, INT, LONG
from csd.kernels.observe import SUCCESSORS
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

# dtypes of the fields of `ObservedTensors` and `TableTensors`
OBSERVED = ObservedTensors(INT, INT, INT, INT, INT, LONG, INT, INT, INT, FLOAT, INT)
TABLE = TableTensors(LONG, LONG, INT, INT, INT, INT, INT, LONG, INT, LONG)
INTS, LONGS, FLOATS = np.empty(0, np.int32), np.empty(0, np.int64), LIKE[FLOAT]


@loop
def _insert_observed(
    seen,  # `ObservedTensors` of addresses
    table,  # `TableTensors` of addresses
    sizes,  # M, N, S, G, A, C, E, ways
    soft,
    hard,
    orders,  # [O]
):
    M, N, S, G, A, C, E, ways = sizes
    group_key = memory(seen.group_key, G, LONGS)
    R, U = M + S, SUCCESSORS
    key, context = np.empty(R, np.int64), np.empty((R, N), np.int32)
    token, weight = np.empty((R, U), np.int32), np.empty((R, U), np.int32)
    total, bit = np.empty(R, np.int32), np.empty(R, np.int32)
    observe_rows(
        memory(seen.slot, M, INTS), memory(seen.depth, M, INTS),
        memory(seen.row_context, (M, N), INTS), memory(seen.group, S, INTS),
        memory(seen.sample, S, INTS), group_key, memory(seen.step, S, INTS),
        memory(seen.drawn, M, INTS), memory(seen.top_token, (M, TOP), INTS),
        memory(seen.top_prob, (M, TOP), FLOATS), memory(seen.accept_row, (S, A), INTS), soft, hard,
        key, context, token, weight, total, bit,
    )  # fmt: skip
    # never refused: the groups of all rows are in flight
    insert_rows(
        key, context, token, weight, total, bit, group_key, orders, ways,
        memory(table.entry_group, C, LONGS), memory(table.entry_hash, C, LONGS),
        memory(table.entry_tokens, (C, N), INTS), memory(table.entry_total, C, INTS),
        memory(table.entry_stamp, C, INTS), memory(table.succ_token, (C, E), INTS),
        memory(table.succ_weight, (C, E), INTS), memory(table.succ_source, (C, E), LONGS),
        memory(table.step, 1, INTS), memory(table.dropped, 1, LONGS),
    )  # fmt: skip


def insert_observed(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig
) -> None:
    """Runs `observe` and then `graph_insert` of its rows; writes `table` in place.

    Tensors are passed by address: making 21 numpy arrays takes longer than observing.
    """
    given, held = observed_tensors(pool, slots, verdict), table_tensors(table)
    plain = on_host(*given, *held) and all(
        x.dtype is dtype and x.is_contiguous()
        for tensors, dtypes in ((given, OBSERVED), (held, TABLE))
        for x, dtype in zip(tensors, dtypes, strict=True)
    )
    if not plain:
        # two calls, one after the other
        seen = observe(pool, slots, verdict, config)
        graph_insert(table, *seen, slots.group_key, config.orders)
        return
    M, N = pool.context.shape
    C, E = table.succ_token.shape
    S, A = verdict.accept_row.shape
    _insert_observed(
        ObservedTensors(*[x.data_ptr() for x in given]),
        TableTensors(*[x.data_ptr() for x in held]),
        (M, N, S, slots.group_key.shape[0], A, C, E, table.ways), config.soft_weight,
        config.hard_weight, order_sizes(config.orders),
    )  # fmt: skip
