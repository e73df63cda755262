"""Observation of a step in one call; the reference is `observe_ref`."""

from collections import namedtuple

import numpy as np

from csd.cpu.compiled import loop
from csd.cpu.tensor_access import on_host, require
from csd.kernels.observe import GROUP_SLOTS, SUCCESSORS, Observed, observed_rows
from csd.state.context_table import ANY, SAMPLE_BITS, WEIGHT_ONE, GraphConfig
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
        out_context[r] = context[r]
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
        pool.slot, pool.depth, pool.context, slots.group, slots.sample, slots.group_key,
        slots.step, verdict.sample, verdict.top_token, verdict.top_prob, verdict.accept_row,
    )  # fmt: skip


def observe(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Rows observed in a step, for `graph_insert`, as `observe_ref`."""
    given = observed_tensors(pool, slots, verdict)
    require(on_host(*given), "observe", *given)
    out, read = observed_rows(pool, slots), (x.contiguous().numpy() for x in given)
    observe_rows(*read, config.soft_weight, config.hard_weight, *(x.numpy() for x in out))
    return out
