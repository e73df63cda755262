"""A row of the pool in the loop: its changed logits, its head with all cuts, and its draw.

A slot's filters and changes are read for its own rows alone, so a slot with options does not slow
the others. With top-k the head is the k largest tokens, which are found from the maxima of the
row's pieces; a greedy row needs its largest token alone. Otherwise the head are all likely tokens.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import memory
from csd.kernels.verify.constants import MAX_HEAD
from csd.kernels.verify.cpu.cuts import keep, min_p_cut, top_p_cut, typical_cut
from csd.kernels.verify.cpu.draws import draw_row
from csd.kernels.verify.cpu.heads import (
    PIECE,
    ROOM,
    WORD,
    changed_logit,
    rest_moment,
    row_head,
    row_largest,
    row_log_sum,
    row_peaks,
)
from csd.state.verdict import TOP

F32, F64 = torch.float32, torch.float64
# a row waits for nothing, for a token of its rest, or for the reference, which computes all of it
READY, REST, WHOLE = 0, 1, 2
# empty arrays of the dtypes in which loops read memory
INT, LONG = np.empty(0, np.int32), np.empty(0, np.int64)
SINGLE, DOUBLE = np.empty(0, np.float32), np.empty(0, np.float64)
BOOL, WORDS = np.empty(0, np.bool_), np.empty(0, np.uint32)


@loop
def workspace(V, wide):
    """Memory that rows of a vocabulary share, for log-probabilities of the dtype of `wide`."""
    pieces = (V + PIECE - 1) // PIECE
    room = min(ROOM, V)
    return (
        np.empty(PIECE, wide.dtype),
        np.empty(pieces, wide.dtype),
        np.empty(room, np.int64),
        np.empty(room, wide.dtype),
        np.empty(room, wide.dtype),
        np.empty(TOP, wide.dtype),
        np.empty(pieces * (PIECE // WORD), np.uint32),
    )


@loop
def _changes(m, s, position, sizes, pool, slots, bits, wide):
    """The changes of row m of slot s, as `change` takes them."""
    M, S, V, I = sizes
    penalty = wide.dtype.type(memory(slots.repetition_penalty, S, DOUBLE)[s])
    early = position < memory(slots.min_new, S, INT)[s]
    bans = memory(slots.ban_ids, (S, I), INT)[s, : I if early else 0]
    if penalty == 1:
        return bits[:0], penalty, bans
    count = (V + WORD - 1) // WORD
    seen = memory(slots.seen, (S, count), WORDS)[s]
    for i in range(count):
        bits[i] = seen[i]
    # with the tokens of the row's own path
    token, parent = memory(pool.token, M, INT), memory(pool.parent, M, INT)
    while m >= 0:
        bits[token[m] // WORD] |= np.uint32(1) << np.uint32(token[m] % WORD)
        m = parent[m]
    return bits[:count], penalty, bans


@loop
def _cut(row, changes, highest, temperature, greedy, sizes, s, slots, work):
    """Write the tokens of a row that its filters keep to `work`.

    Returns their number, the mass of those below the head, and False if the reference must compute
    the row. highest: maximum of the changed row, divided by the temperature.
    """
    S, V = sizes[1:3]
    z, most, token, score, heap, _, _ = work
    kind = type(temperature)
    k = memory(slots.top_k, S, INT)[s]
    k = 1 if greedy else k if k < V else 0
    rest = kind(0)
    if k > MAX_HEAD:
        return 0, rest, False
    if k > 0:
        count = row_largest(row, changes, highest, temperature, most, k, token, score, z, heap)
    else:
        count, rest = row_head(row, changes, highest, temperature, most, token, score, z)
    if count > token.shape[0]:
        return 0, rest, False
    if greedy:
        return count, rest, True
    top_p = kind(memory(slots.top_p, S, DOUBLE)[s])
    min_p = kind(memory(slots.min_p, S, DOUBLE)[s])
    typical_p = kind(memory(slots.typical_p, S, DOUBLE)[s])
    if top_p < 1:
        if top_p_cut(score[:count], rest, top_p):
            return 0, rest, False
        count, rest = keep(token[:count], score[:count], kind(-np.inf)), kind(0)
    if min_p > 0:
        if min_p_cut(score[:count], rest, min_p):
            return 0, rest, False
        count, rest = keep(token[:count], score[:count], kind(-np.inf)), kind(0)
    if typical_p < 1:
        moment = rest_moment(row, changes, highest, temperature, z) if rest > 0 else kind(0)
        if typical_cut(score[:count], rest, moment, typical_p):
            return 0, rest, False
        count, rest = keep(token[:count], score[:count], kind(-np.inf)), kind(0)
    return count, rest, True


@loop
def sample_row(m, s, given, row, sizes, pool, slots, work, wide, top_token, top_prob):
    """Sample row m of slot s, or take the token `given` unless it is -1.

    Returns what the row waits for (`READY`, `REST` or `WHOLE`), its token, the token's
    log-probability, the log of the row's mass after the filters, and its own log-sum-exp. Of a row
    that waits for a token of its rest only the token and its log-probability are missing. Writes
    the likeliest tokens. row: its logits [V].
    """
    M, S, V, _ = sizes
    z, most, token, score, _, top, bits = work
    kind = wide.dtype.type
    position = memory(slots.generated, S, INT)[s] + memory(pool.depth, M, INT)[m]
    heat = memory(slots.temperature, S, DOUBLE)[s]
    greedy = heat == 0
    temperature = kind(1) if greedy else kind(heat)

    changes = _changes(m, s, position, sizes, pool, slots, bits, wide)
    own, highest = row_peaks(row, changes, most, z)
    highest /= temperature
    log_sum = row_log_sum(row, own, z)
    drawn, chance, total = np.int64(-1), kind(0), kind(np.nan)
    # not finite: a bad row
    if not (np.isfinite(highest) and np.isfinite(log_sum)):
        return WHOLE, drawn, chance, total, log_sum
    count, rest, kept = _cut(row, changes, highest, temperature, greedy, sizes, s, slots, work)
    if not kept:
        return WHOLE, drawn, chance, total, log_sum
    drawn, chance, total = draw_row(
        token[:count],
        score[:count],
        rest,
        memory(slots.key, S, LONG)[s],
        memory(slots.sample, S, INT)[s],
        position,
        greedy,
        V,
        top,
        top_token,
        top_prob,
    )
    if given >= 0:
        drawn, chance = given, kind(-np.inf)
        if rest > 0:
            chance = changed_logit(row, given, changes, z) / temperature - highest - total
        for w in range(count):
            if token[w] == given:
                chance = score[w] - total
    return REST if drawn == V else READY, drawn, chance, total, log_sum
