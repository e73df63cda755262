"""A row of the pool in the loop: its changed logits, the tokens that its filters keep, its draw.

A slot's filters and changes are read for its own rows alone, so a slot with options does not slow
the others. With top-k the k largest tokens are listed, which are found from the maxima of the row's
pieces; a greedy row needs its largest token alone. Otherwise the head is listed. A cut that falls
below the head lists all tokens.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import exp, log
from csd.kernels.verify.constants import HEAD_WIDTH, MAX_HEAD
from csd.kernels.verify.cpu.cuts import (
    boundary,
    in_lanes,
    keep,
    masses,
    shifts,
    typical_reach,
    weigh,
)
from csd.kernels.verify.cpu.draws import draw_rest, draw_row, rank
from csd.kernels.verify.cpu.heads import (
    ALL,
    PIECE,
    WORD,
    changed_logit,
    has_nan,
    rest_moment,
    rest_token,
    row_largest,
    row_log_sum,
    row_peaks,
    row_tokens,
)
from csd.state.verdict import TOP

F32, F64 = torch.float32, torch.float64


@loop
def workspace(V, wide):
    """Memory that rows of a vocabulary share, for log-probabilities of the dtype of `wide`."""
    pieces = (V + PIECE - 1) // PIECE
    return (
        np.empty(PIECE, wide.dtype),
        np.empty(pieces, wide.dtype),
        # listed tokens, their scores and masses, and another number of each
        np.empty(V, np.int64),
        np.empty(V, wide.dtype),
        np.empty(V, wide.dtype),
        np.empty(V, wide.dtype),
        np.empty(TOP, wide.dtype),
        np.empty(PIECE, np.uint32),
        np.empty(pieces * (PIECE // WORD), np.uint32),
    )


@loop
def _changes(m, s, position, pool, slots, bits, z):
    """The changes of row m of slot s, as `change` takes them."""
    penalty = z.dtype.type(slots.repetition_penalty[s])
    bans = slots.ban_ids[s, : slots.ban_ids.shape[1] if position < slots.min_new[s] else 0]
    if penalty == 1:
        return bits[:0], penalty, bans
    count = min(slots.seen.shape[1], bits.shape[0])
    for i in range(count):
        bits[i] = slots.seen[s, i]
    # with the tokens of the row's own path
    while m >= 0:
        token = pool.token[m]
        bits[token // WORD] |= np.uint32(1) << np.uint32(token % WORD)
        m = pool.parent[m]
    return bits[:count], penalty, bans


@loop
def _cut(of_row, greedy, s, slots, work):
    """List the tokens of a row that its filters keep, with their scores and masses, in `work`.

    Returns their number, the least score of the head, its mass, that of the kept tokens below it,
    and whether these are listed too: without filters they are not. of_row: as in `scores`.
    """
    z, most, token, score, mass, other, _, _, _ = work
    V, highest = of_row[0].shape[0], of_row[2]
    kind = type(highest)
    k = slots.top_k[s]
    k = 1 if greedy else k if k < V else 0
    low, rest, whole = kind(-HEAD_WIDTH), kind(0), k > 0
    if whole:
        low = kind(-np.inf) if k <= MAX_HEAD else low
        count = row_largest(of_row, most, k, token, score, other, z)
    else:
        count, rest = row_tokens(of_row, most, low, True, token, score, z)
    weigh(score[:count], mass)
    head, below = masses(score[:count], mass, low)
    rest = kind(below) if whole else rest
    if greedy:
        return count, low, kind(head), rest, whole

    top_p = kind(slots.top_p[s])
    if top_p < 1:
        total, tail = kind(head) + rest, kind(1) - top_p
        deep = rest / total > tail
        if deep and not whole:
            count = _all(of_row, most, token, score, mass, z)
        first, end, start = (kind(ALL), low, kind(0)) if deep else (low, kind(np.inf), rest)
        least, place = boundary(score[:count], mass, first, end, start, total, tail)
        count = keep(token[:count], score, mass, score, least, place)
        head, below = masses(score[:count], mass, low)
        whole, rest = True, kind(below)
    min_p = kind(slots.min_p[s])
    if min_p > 0:
        if rest > 0 and not whole and min_p <= exp(low):
            count = _all(of_row, most, token, score, mass, z)
        count = keep(token[:count], score, mass, mass, min_p, 0)
        head, below = masses(score[:count], mass, low)
        whole, rest = True, kind(below)
    typical_p = kind(slots.typical_p[s])
    if typical_p < 1:
        of_head, of_rest = in_lanes(score[:count], mass, low, True)
        moment = kind(of_rest) if whole else rest_moment(of_row, low, z)
        total = kind(head) + rest
        mean, target = (kind(of_head) + moment) / total, typical_p * total
        near = shifts(score[:count], mass, low, mean, other)
        if rest > 0:
            deep = kind(near) < target
            if not deep and whole:
                count = keep(token[:count], score, mass, score, low, 0)
            elif deep and not whole:
                count = _all(of_row, most, token, score, mass, z)
            shifts(score[:count], mass, low, mean, other)
        reach = typical_reach(mass, other[:count], target)
        for w in range(count):
            other[w] = -other[w]
        count = keep(token[:count], score, mass, other, -reach, 0)
        head, below = masses(score[:count], mass, low)
        whole, rest = True, kind(below)
    return count, low, kind(head), rest, whole


@loop
def _all(of_row, most, token, score, mass, z):
    """List all tokens of a row; returns their number."""
    least = type(of_row[2])(ALL)
    count, _ = row_tokens(of_row, most, least, False, token, score, z)
    weigh(score[:count], mass)
    return count


@loop
def sample_row(m, s, given, logits, pool, slots, work, top_token, top_prob):
    """Sample row m of slot s, or take the token `given` unless it is -1.

    Returns its token, the token's log-probability, True for a bad row, which has neither, and the
    row's own log-sum-exp. Writes the likeliest tokens unless a token is given. logits: [V].
    """
    z, most, token, score, mass, _, top, words, bits = work
    kind = z.dtype.type
    position = slots.generated[s] + pool.depth[m]
    heat = slots.temperature[s]
    greedy = heat == 0
    temperature = kind(1) if greedy else kind(heat)

    changes = _changes(m, s, position, pool, slots, bits, z)
    own, highest = row_peaks(logits, changes, most, z)
    highest /= temperature
    log_sum = row_log_sum(logits, own, z)
    if not (np.isfinite(highest) and np.isfinite(log_sum)):
        unchanged = changes[0][:0], changes[1], changes[2][:0]
        if given >= 0 and own == -np.inf and not has_nan(logits, unchanged, z):
            # a given token may lead to where no token is allowed
            return given, kind(-np.inf), False, log_sum
        if not np.isfinite(highest) or has_nan(logits, changes, z):
            rank(token[:0], score, kind(0), kind(0), greedy, top, top_token, top_prob)
            return max(given, np.int64(0)), kind(np.nan), True, log_sum

    of_row = logits, changes, highest, temperature
    count, low, head, rest, whole = _cut(of_row, greedy, s, slots, work)
    total, index, drawn = log(head + rest), np.int64(0), given
    if given >= 0:
        index = np.int64(-1)
        for w in range(count):
            if token[w] == given:
                index = np.int64(w)
    else:
        rank(token[:count], score, low, total, greedy, top, top_token, top_prob)
        if not greedy:
            noise = slots.key[s], slots.sample[s], position
            vocab = logits.shape[0]
            index = draw_row(token[:count], score, mass, low, rest, noise, vocab, words)
            if index < 0 and whole:
                index = draw_rest(score[:count], mass, low, noise)
            elif index < 0:
                drawn = rest_token(of_row, low, noise, z)
    if index >= 0:
        return token[index], score[index] - total, False, log_sum
    if whole:
        return given, kind(-np.inf), False, log_sum
    chance = changed_logit(logits, drawn, changes, z) / temperature - highest - total
    return drawn, chance, False, log_sum


@loop
def write_filtered(logits, s, slots, work, out):
    """Write a row's probabilities after the filters of slot s; its logits are changed already.

    out: [V].
    """
    z, most, token, score, mass, _, _, _, bits = work
    kind = type(mass[0])
    temperature = kind(slots.temperature[s])
    changes = bits[:0], kind(1), np.empty(0, np.int32)
    _, highest = row_peaks(logits, changes, most, z)
    of_row = logits, changes, highest / temperature, temperature
    count, _, head, rest, whole = _cut(of_row, False, s, slots, work)
    if not whole:
        count = _all(of_row, most, token, score, mass, z)
    out[:] = 0
    for w in range(count):
        out[token[w]] = mass[w] / (head + rest)
