"""Observation of a step, and observation with insertion of the observed rows, each in one call.

The references are `observe_ref`, and `graph_insert_ref` of its rows.
"""

from collections import namedtuple

import numpy as np

from csd.kernels.common.checks import FLOAT, INT, LONG
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import LIKE, memory, on_host, require
from csd.kernels.table.cpu.insert import TableTensors, graph_insert, insert_rows, table_tensors
from csd.kernels.table.cpu.lookup import order_sizes
from csd.kernels.table.rows import GROUP_SLOTS, SUCCESSORS, Observed, observed_rows
from csd.state.context_table import ANY, SAMPLE_BITS, WEIGHT_ONE, GraphConfig, Table
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict


@loop
def observe_rows(
    slot,  # [M]
    depth,  # [M]
    context,  # [M, N]
    group,  # [S]
    sample_index,  # [S]
    group_key,  # [G]
    step,  # [S]
    sample,  # [M]
    top_token,  # [M, TOP]
    top_prob,  # [M, TOP]
    accept_row,  # [S, A]
    soft,
    hard,
    out_key,  # [M + S], written, and so are all below
    out_context,  # [M + S, N]
    token,  # [M + S, SUCCESSORS]
    weight,  # [M + S, SUCCESSORS]
    total,  # [M + S]
    bit,  # [M + S]
):
    """Write the observed rows: those of the pool, then one per slot for its group."""
    M, S = slot.shape[0], group.shape[0]
    for r in range(M):
        s = max(slot[r], 0)
        # not as whole rows: numba would compile the text of their error
        for n in range(context.shape[1]):
            out_context[r, n] = context[r, n]
        has_top, drawn = False, np.int64(0)
        for u in range(TOP):
            # float64 holds the product exactly: one rounding
            top = np.int64(np.rint(np.float64(top_prob[r, u]) * soft))
            token[r, u], weight[r, u] = top_token[r, u], top
            has_top |= top != 0
        if accept_row[s, depth[r]] == r:
            drawn = hard if has_top else soft
        left = drawn
        for u in range(TOP):
            if top_token[r, u] == sample[r]:
                weight[r, u] += drawn
                left -= drawn
        token[r, TOP], weight[r, TOP] = sample[r], left
        total[r] = drawn + (soft if has_top else 0)
        _whose(r, s, group, group_key, sample_index, total, out_key, bit)

    # slots of each group that have a path, and those of them before each slot; -1 is a group too
    mates, before = np.zeros(group_key.shape[0] + 1, np.int64), np.zeros(S, np.int64)
    for s in range(S):
        before[s] = mates[group[s] + 1]
        mates[group[s] + 1] += accept_row[s, 0] >= 0
    for s in range(S):
        r = M + s
        out_context[r] = -1
        out_context[r, 0] = ANY
        rounds = max((mates[group[s] + 1] + GROUP_SLOTS - 1) // GROUP_SLOTS, 1)
        due, total[r] = (step[s] + before[s]) % rounds == 0, 0
        for u in range(SUCCESSORS):
            row = accept_row[s, u]
            added = WEIGHT_ONE if row >= 0 and due else 0
            token[r, u], weight[r, u] = sample[max(row, 0)], added
            total[r] += added
        _whose(r, s, group, group_key, sample_index, total, out_key, bit)


@loop
def _whose(r, s, group, group_key, sample_index, total, key, bit):
    """Writes row r's group key, -1 if its total is 0, and the source bit of slot s's sample."""
    key[r] = group_key[max(group[s], 0)] if total[r] > 0 else -1
    bit[r] = sample_index[s] % SAMPLE_BITS


# the tensors of a step that the loop reads, in the order of its arguments
ObservedTensors = namedtuple(
    "ObservedTensors",
    "slot depth row_context group sample group_key step drawn top_token top_prob accept_row",
)


def observed_tensors(pool: Pool, slots: Slots, verdict: Verdict) -> ObservedTensors:
    """The tensors of a step that the loop reads."""
    return ObservedTensors(
        pool.slot,
        pool.depth,
        pool.context,
        slots.group,
        slots.sample,
        slots.group_key,
        slots.step,
        verdict.sample,
        verdict.top_token,
        verdict.top_prob,
        verdict.accept_row,
    )


def observe(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Rows observed in a step, for `graph_insert`, as `observe_ref`."""
    tensors = observed_tensors(pool, slots, verdict)
    require(on_host(*tensors), "observe", *tensors)
    out, read = observed_rows(pool, slots), (x.contiguous().numpy() for x in tensors)
    observe_rows(*read, config.soft_weight, config.hard_weight, *(x.numpy() for x in out))
    return out


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
        memory(seen.slot, M, INTS),
        memory(seen.depth, M, INTS),
        memory(seen.row_context, (M, N), INTS),
        memory(seen.group, S, INTS),
        memory(seen.sample, S, INTS),
        group_key,
        memory(seen.step, S, INTS),
        memory(seen.drawn, M, INTS),
        memory(seen.top_token, (M, TOP), INTS),
        memory(seen.top_prob, (M, TOP), FLOATS),
        memory(seen.accept_row, (S, A), INTS),
        soft,
        hard,
        key,
        context,
        token,
        weight,
        total,
        bit,
    )
    # never refused: the groups of all rows are in flight
    insert_rows(
        key,
        context,
        token,
        weight,
        total,
        bit,
        group_key,
        orders,
        ways,
        memory(table.entry_group, C, LONGS),
        memory(table.entry_hash, C, LONGS),
        memory(table.entry_tokens, (C, N), INTS),
        memory(table.entry_total, C, INTS),
        memory(table.entry_stamp, C, INTS),
        memory(table.succ_token, (C, E), INTS),
        memory(table.succ_weight, (C, E), INTS),
        memory(table.succ_source, (C, E), LONGS),
        memory(table.step, 1, INTS),
        memory(table.dropped, 1, LONGS),
    )


def insert_observed(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig
) -> None:
    """Runs `observe` and then `graph_insert` of its rows; writes `table` in place.

    Tensors are passed by address: making 21 numpy arrays takes longer than observing.
    """
    observed, held = observed_tensors(pool, slots, verdict), table_tensors(table)
    plain = on_host(*observed, *held) and all(
        x.dtype is dtype and x.is_contiguous()
        for tensors, dtypes in ((observed, OBSERVED), (held, TABLE))
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
        ObservedTensors(*[x.data_ptr() for x in observed]),
        TableTensors(*[x.data_ptr() for x in held]),
        (M, N, S, slots.group_key.shape[0], A, C, E, table.ways),
        config.soft_weight,
        config.hard_weight,
        order_sizes(config.orders),
    )
