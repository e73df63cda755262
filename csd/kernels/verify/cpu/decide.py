"""Decision of a step in two calls: `verify`, then `advance_slots` together with `snapshot`.

Each takes tens of microseconds; the references run dozens of small operations of PyTorch.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import LIKE, memory
from csd.kernels.verify.advance_slots import advance_slots_ref
from csd.kernels.verify.cpu.path import verify
from csd.kernels.verify.cpu.rows import BOOL, DOUBLE, F32, F64, INT, SINGLE
from csd.kernels.verify.layout import empty_snapshot
from csd.kernels.verify.snapshot import snapshot_ref
from csd.kernels.verify.views import ADVANCED, TREES, VERDICT
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, RUNNING, TOP, Verdict


@loop
def _finish(
    sizes,  # M, S, and widths of the slots' context (N), tokens (T) and seen (W)
    top,  # whether the snapshot has the target's top 8
    trees,  # whether the snapshot has the trees
    pool,  # of `TREES`
    slots,  # of `ADVANCED`
    verdict,  # of `VERDICT`
    ints,  # address of the snapshot's int32 tensor, written
    floats,  # likewise of its floats
    stored,  # array of the dtype of the slots' log-probabilities
    wide,  # likewise of the verdict's
):
    """Advance all slots and write the snapshot; tensors are addresses."""
    M, S = sizes[:2]
    for s in range(S):
        _advance(s, sizes, slots, verdict, stored, wide)
        _write_slot(s, M, S, pool, verdict, ints, floats, wide)
    depth, cost = memory(pool.depth, M, INT), memory(pool.cost, M, INT)
    out = memory(ints + 4 * (4 * S + 2 * S * ACCEPT), M, INT)
    for m in range(M):
        out[m] = cost[m] if depth[m] > 0 else -1
    more = ints + 4 * (4 * S + 2 * S * ACCEPT + M)
    if top:
        put = floats + 2 * S * ACCEPT * wide.itemsize
        _write_top(M, S, verdict, more, put, wide)
        more += 4 * S * ACCEPT * TOP
    if trees:
        _write_trees(M, S, pool, verdict.accept_row, more)


@loop
def _advance(s, sizes, slots, verdict, stored, wide):
    """Append the committed tokens to slot s and move it on, in place, as `advance_slots_ref`."""
    M, S, N, T, W = sizes
    live, generated = memory(slots.live, S, BOOL), memory(slots.generated, S, INT)
    step, context = memory(slots.step, S, INT), memory(slots.context, (S, N), INT)[s]
    tokens, seen = memory(slots.tokens, (S, T), INT)[s], memory(slots.seen, (S, W), INT)[s]
    penalised = memory(slots.repetition_penalty, S, DOUBLE)[s] != 1
    to = memory(slots.logprobs, (S, T), stored)[s]
    raw_to = memory(slots.raw_logprobs, (S, T), stored)[s]
    sample, row = memory(verdict.sample, M, INT), memory(verdict.accept_row, (S, ACCEPT), INT)[s]
    logprob, raw_logprob = memory(verdict.logprob, M, wide), memory(verdict.raw_logprob, M, wide)
    count, finish = memory(verdict.accept_count, S, INT)[s], memory(verdict.finish, S, INT)[s]

    for i in range(count):
        token, offset = sample[row[i]], min(generated[s] + i, T - 1)
        tokens[offset], to[offset], raw_to[offset] = token, logprob[row[i]], raw_logprob[row[i]]
        if penalised:
            seen[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    # backwards, so that each is read before it is overwritten
    for i in range(N - 1, -1, -1):
        context[i] = sample[row[count - 1 - i]] if i < count else context[i - count]
    step[s] += count > 0
    generated[s] += count
    live[s] &= finish == RUNNING


@loop
def _write_slot(s, M, S, pool, verdict, ints, floats, wide):
    """Write slot s's fields of a snapshot that do not depend on `top` and `trees`."""
    A = ACCEPT
    sample, source = memory(verdict.sample, M, INT), memory(pool.source, M, INT)
    row, count = memory(verdict.accept_row, (S, A), INT)[s], memory(verdict.accept_count, S, INT)[s]
    slot = memory(ints, (4, S), INT)
    slot[0, s], slot[1, s] = count, memory(pool.slot_nodes, S, INT)[s]
    slot[2, s], slot[3, s] = memory(verdict.finish, S, INT)[s], memory(verdict.bad, S, BOOL)[s]
    path = memory(ints + 4 * 4 * S, (2, S, A), INT)
    logprob, raw_logprob = memory(verdict.logprob, M, wide), memory(verdict.raw_logprob, M, wide)
    chance = memory(floats, (2, S, A), wide)
    for i in range(A):
        path[0, s, i] = sample[row[i]] if i < count else -1
        # token i of the path was drafted as its row i + 1
        path[1, s, i] = source[row[i + 1]] if i + 1 < count else 0
        chance[0, s, i] = logprob[row[i]] if i < count else 0
        chance[1, s, i] = raw_logprob[row[i]] if i < count else 0


@loop
def _write_top(M, S, verdict, ints, floats, wide):
    """Write the target's top 8 tokens and probabilities at the rows of all paths."""
    row = memory(verdict.accept_row, S * ACCEPT, INT)
    top_token = memory(verdict.top_token, (M, TOP), INT)
    top_prob = memory(verdict.top_prob, (M, TOP), SINGLE)
    token, prob = memory(ints, (row.size, TOP), INT), memory(floats, (row.size, TOP), wide)
    for i in range(row.size):
        for j in range(TOP):
            token[i, j] = top_token[row[i], j] if row[i] >= 0 else -1
            prob[i, j] = top_prob[row[i], j] if row[i] >= 0 else 0


@loop
def _write_trees(M, S, pool, accept_row, ints):
    """Write the trees and their accepted rows."""
    _copy(pool.slot_start, ints, S)
    out = ints + 4 * S
    _copy(pool.token, out, M)
    _copy(pool.parent, out + 4 * M, M)
    _copy(pool.cost, out + 8 * M, M)
    _copy(pool.source, out + 12 * M, M)
    _copy(accept_row, out + 16 * M, S * ACCEPT)


@loop
def _copy(source, to, count):
    """Copy `count` int32 numbers between addresses.

    numba compiles an assignment of whole arrays with the text of its error, for 1.5 s.
    """
    read, written = memory(source, count, INT), memory(to, count, INT)
    for i in range(count):
        written[i] = read[i]


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
    widths = slots.context.shape[1], slots.tokens.shape[1], slots.seen.shape[1]
    _finish(
        (pool.rows, slots.count, *widths),
        top,
        trees,
        *records,
        ints.data_ptr(),
        floats.data_ptr(),
        LIKE[stored],
        LIKE[wide],
    )
    return ints, floats
