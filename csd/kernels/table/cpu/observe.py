"""Observation of a step, and observation with insertion of the observed rows, each in one call.

The references are `observe_ref`, and `graph_insert_ref` of its rows.
"""

import numpy as np

from csd.kernels.numba.jit import loop
from csd.kernels.numba.records import Sizes, opener
from csd.kernels.numba.tensors import require
from csd.kernels.table.cpu.insert import graph_insert, insert_rows
from csd.kernels.table.cpu.lookup import order_sizes
from csd.kernels.table.rows import (
    GROUP_SLOTS,
    OBSERVED,
    POOL,
    SLOTS,
    SUCCESSORS,
    TABLE,
    VERDICT,
    Observed,
    observed_rows,
)
from csd.state.context_table import ANY, SAMPLE_BITS, WEIGHT_ONE, GraphConfig, Table
from csd.state.pool import Pool
from csd.state.record import on_host
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict


@loop
def observe_rows(
    pool,  # arrays of a `Pool`
    slots,  # arrays of the `Slots`
    verdict,  # arrays of a `Verdict`
    soft,
    hard,
    out,  # arrays of `Observed`, written
):
    """Write the observed rows: those of the pool, then one per slot for its group."""
    slot, context, group, sample = pool.slot, pool.context, slots.group, verdict.sample
    top_token, accept_row = verdict.top_token, verdict.accept_row
    token, weight, total = out.succ_token, out.succ_weight, out.row_total
    M, S = slot.shape[0], group.shape[0]
    for r in range(M):
        s = max(slot[r], 0)
        # not as whole rows: numba would compile the text of their error
        for n in range(context.shape[1]):
            out.context[r, n] = context[r, n]
        has_top, drawn = False, np.int64(0)
        for u in range(TOP):
            # float64 holds the product exactly: one rounding
            top = np.int64(np.rint(np.float64(verdict.top_prob[r, u]) * soft))
            token[r, u], weight[r, u] = top_token[r, u], top
            has_top |= top != 0
        if accept_row[s, pool.depth[r]] == r:
            drawn = hard if has_top else soft
        left = drawn
        for u in range(TOP):
            if top_token[r, u] == sample[r]:
                weight[r, u] += drawn
                left -= drawn
        token[r, TOP], weight[r, TOP] = sample[r], left
        total[r] = drawn + (soft if has_top else 0)
        _whose(r, s, slots, out)

    # slots of each group that have a path, and those of them before each slot; -1 is a group too
    mates, before = np.zeros(slots.group_key.shape[0] + 1, np.int64), np.zeros(S, np.int64)
    for s in range(S):
        before[s] = mates[group[s] + 1]
        mates[group[s] + 1] += accept_row[s, 0] >= 0
    for s in range(S):
        r = M + s
        out.context[r] = -1
        out.context[r, 0] = ANY
        rounds = max((mates[group[s] + 1] + GROUP_SLOTS - 1) // GROUP_SLOTS, 1)
        due, total[r] = (slots.step[s] + before[s]) % rounds == 0, 0
        for u in range(SUCCESSORS):
            row = accept_row[s, u]
            added = WEIGHT_ONE if row >= 0 and due else 0
            token[r, u], weight[r, u] = sample[max(row, 0)], added
            total[r] += added
        _whose(r, s, slots, out)


@loop
def _whose(r, s, slots, out):
    """Writes row r's group key, -1 if its total is 0, and the source bit of slot s's sample."""
    out.group_key[r] = slots.group_key[max(slots.group[s], 0)] if out.row_total[r] > 0 else -1
    out.source_bit[r] = slots.sample[s] % SAMPLE_BITS


def observe(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Rows observed in a step, for `graph_insert`, as `observe_ref`."""
    read, out = (POOL(pool), SLOTS(slots), VERDICT(verdict)), observed_rows(pool, slots)
    tensors = [x for view in read for x in view]
    require(on_host(*tensors), "observe", *tensors)
    arrays = (type(view)(*[x.contiguous().numpy() for x in view]) for view in read)
    observe_rows(*arrays, config.soft_weight, config.hard_weight, OBSERVED.arrays(out))
    return out


open_pool, open_slots, open_verdict = opener(POOL), opener(SLOTS), opener(VERDICT)
open_table, RowArrays = opener(TABLE), OBSERVED.kind


@loop
def _insert_observed(
    pool,  # addresses of a `Pool`
    slots,  # addresses of the `Slots`
    verdict,  # addresses of a `Verdict`
    table,  # addresses of the `Table`
    sizes,  # of all records
    ways,
    soft,
    hard,
    orders,  # [O]
):
    R, N, U = sizes.M + sizes.S, sizes.N, SUCCESSORS
    rows = RowArrays(
        np.empty(R, np.int64),
        np.empty((R, N), np.int32),
        np.empty((R, U), np.int32),
        np.empty((R, U), np.int32),
        np.empty(R, np.int32),
        np.empty(R, np.int32),
    )
    of_slots = open_slots(slots, sizes)
    of_step = open_pool(pool, sizes), of_slots, open_verdict(verdict, sizes)
    observe_rows(*of_step, soft, hard, rows)
    # never refused: the groups of all rows are in flight
    insert_rows(rows, of_slots.group_key, orders, ways, open_table(table, sizes))


def insert_observed(
    table: Table, pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig
) -> None:
    """Runs `observe` and then `graph_insert` of its rows; writes `table` in place.

    Tensors are passed by address: making 21 numpy arrays takes longer than observing.
    """
    read = [
        view.addresses(record)
        for view, record in ((POOL, pool), (SLOTS, slots), (VERDICT, verdict), (TABLE, table))
    ]
    if None in read:
        # two calls, one after the other
        seen = observe(pool, slots, verdict, config)
        graph_insert(table, *seen, slots.group_key, config.orders)
        return
    (M, N), (S, A), (C, E) = pool.context.shape, verdict.accept_row.shape, table.succ_token.shape
    sizes = Sizes(M=M, S=S, G=slots.group_key.shape[0], N=N, A=A, C=C, E=E)
    weights = config.soft_weight, config.hard_weight
    _insert_observed(*read, sizes, table.ways, *weights, order_sizes(config.orders))
