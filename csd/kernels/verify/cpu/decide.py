"""Decision of a step in two calls: `verify`, then `advance_slots` together with `snapshot`.

Each takes tens of microseconds; the references run dozens of small operations of PyTorch.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.records import Sizes, opener
from csd.kernels.numba.tensors import LIKE, memory
from csd.kernels.verify.advance_slots import advance_slots_ref
from csd.kernels.verify.cpu.path import INT, open_verdict, verify
from csd.kernels.verify.cpu.rows import F32, F64
from csd.kernels.verify.layout import empty_snapshot
from csd.kernels.verify.snapshot import snapshot_ref
from csd.kernels.verify.views import ADVANCED, TREES, VERDICT
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, RUNNING, TOP, Verdict

open_trees, open_advanced = opener(TREES), opener(ADVANCED)


@loop
def _finish(
    sizes,  # of the pool, the slots and the verdict
    top,  # whether the snapshot has the target's top 8
    trees,  # whether the snapshot has the trees
    pool_at,  # addresses of `TREES`
    slots_at,  # addresses of `ADVANCED`
    verdict_at,  # addresses of `VERDICT`
    ints,  # address of the snapshot's int32 tensor, written
    floats,  # likewise of its floats
    stored,  # array of the dtype of the slots' log-probabilities
    wide,  # likewise of the verdict's
):
    """Advance all slots and write the snapshot."""
    M, S = sizes.M, sizes.S
    pool, slots = open_trees(pool_at, sizes), open_advanced(slots_at, sizes, stored)
    verdict = open_verdict(verdict_at, sizes, wide)
    for s in range(S):
        _advance(s, slots, verdict)
        _write_slot(s, pool, verdict, ints, floats, wide)
    out = memory(ints + 4 * (4 * S + 2 * S * ACCEPT), M, INT)
    for m in range(M):
        out[m] = pool.cost[m] if pool.depth[m] > 0 else -1
    more = ints + 4 * (4 * S + 2 * S * ACCEPT + M)
    if top:
        _write_top(verdict, more, floats + 2 * S * ACCEPT * wide.itemsize, wide)
        more += 4 * S * ACCEPT * TOP
    if trees:
        _write_trees(pool, verdict.accept_row, more)


@loop
def _advance(s, slots, verdict):
    """Append the committed tokens to slot s and move it on, in place, as `advance_slots_ref`."""
    context, tokens, seen = slots.context[s], slots.tokens[s], slots.seen[s]
    penalised = slots.repetition_penalty[s] != 1
    row, count = verdict.accept_row[s], verdict.accept_count[s]
    for i in range(count):
        m = row[i]
        token, offset = verdict.sample[m], min(slots.generated[s] + i, tokens.shape[0] - 1)
        tokens[offset] = token
        slots.logprobs[s, offset] = verdict.logprob[m]
        slots.raw_logprobs[s, offset] = verdict.raw_logprob[m]
        if penalised:
            seen[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    # backwards, so that each is read before it is overwritten
    for i in range(context.shape[0] - 1, -1, -1):
        context[i] = verdict.sample[row[count - 1 - i]] if i < count else context[i - count]
    slots.step[s] += count > 0
    slots.generated[s] += count
    slots.live[s] &= verdict.finish[s] == RUNNING


@loop
def _write_slot(s, pool, verdict, ints, floats, wide):
    """Write slot s's fields of a snapshot that do not depend on `top` and `trees`."""
    S, A = verdict.accept_row.shape
    row, count = verdict.accept_row[s], verdict.accept_count[s]
    slot = memory(ints, (4, S), INT)
    slot[0, s], slot[1, s] = count, pool.slot_nodes[s]
    slot[2, s], slot[3, s] = verdict.finish[s], verdict.bad[s]
    path = memory(ints + 4 * 4 * S, (2, S, A), INT)
    chance = memory(floats, (2, S, A), wide)
    for i in range(A):
        path[0, s, i] = verdict.sample[row[i]] if i < count else -1
        # token i of the path was drafted as its row i + 1
        path[1, s, i] = pool.source[row[i + 1]] if i + 1 < count else 0
        chance[0, s, i] = verdict.logprob[row[i]] if i < count else 0
        chance[1, s, i] = verdict.raw_logprob[row[i]] if i < count else 0


@loop
def _write_top(verdict, ints, floats, wide):
    """Write the target's top 8 tokens and probabilities at the rows of all paths."""
    row = verdict.accept_row.reshape(verdict.accept_row.size)
    token, prob = memory(ints, (row.size, TOP), INT), memory(floats, (row.size, TOP), wide)
    for i in range(row.size):
        for j in range(TOP):
            token[i, j] = verdict.top_token[row[i], j] if row[i] >= 0 else -1
            prob[i, j] = verdict.top_prob[row[i], j] if row[i] >= 0 else 0


@loop
def _write_trees(pool, accept_row, ints):
    """Write the trees and their accepted rows."""
    rows = accept_row.reshape(accept_row.size)
    for source in (pool.slot_start, pool.token, pool.parent, pool.cost, pool.source, rows):
        # numba compiles an assignment of whole arrays with the text of its error, for 1.5 s
        written = memory(ints, source.size, INT)
        for i in range(source.size):
            written[i] = source[i]
        ints += 4 * source.size


def decide(
    logits: torch.Tensor, pool: Pool, slots: Slots, top: bool, trees: bool
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Verifies the logits, then runs `finish`; the slots are written in place.

    Returns the verdict and the snapshot's tensors, int32 and floats.
    """
    verdict = verify(logits, pool, slots)
    return verdict, *finish(pool, slots, verdict, top, trees)


def finish(
    pool: Pool, slots: Slots, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances the slots in place, as `advance_slots_ref`, and returns `snapshot_ref`'s tensors.

    The references themselves run for dtypes or layouts that the loop does not read.
    """
    wide, stored = verdict.logprob.dtype, slots.logprobs.dtype
    records = (
        TREES.addresses(pool),
        ADVANCED.addresses(slots, stored),
        VERDICT.addresses(verdict, wide),
    )
    if None in records or not {wide, stored} <= {F32, F64}:
        # the references, one after the other
        advance_slots_ref(slots, verdict)
        return snapshot_ref(pool, verdict, top, trees)
    ints, floats = empty_snapshot(pool, verdict, top, trees)
    (S, N), T, words = slots.context.shape, slots.tokens.shape[1], slots.seen.shape[1]
    _finish(
        Sizes(M=pool.rows, S=S, N=N, T=T, A=ACCEPT, words=words),
        top,
        trees,
        *records,
        ints.data_ptr(),
        floats.data_ptr(),
        LIKE[stored],
        LIKE[wide],
    )
    return ints, floats
