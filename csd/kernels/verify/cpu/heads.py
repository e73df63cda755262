"""Passes over a row of logits: its changes, its maxima, its head and its log-sum-exp.

A row is processed in pieces of `PIECE` tokens, in a workspace `z` of the type of its
log-probabilities. Its changes are the slot's repetition penalty and its banned end tokens; they are
applied to a piece when it is read, so that no changed copy of the row is made.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import added, exp, log, peak
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.verify.cpu.cuts import keep, kth_largest
from csd.kernels.verify.cpu.draws import rest_target

# numbers of a row that are processed at a time, and tokens in a word of a bitmap
PIECE, WORD = 256, 32
# below the score of every token that is allowed
ALL = -1e30


@loop
def load(row, offset, z):
    """Read a piece of a row into z; returns its width. z is -inf after the row's end."""
    width = min(PIECE, row.shape[0] - offset)
    part = row[offset : offset + width]
    for j in range(width):
        z[j] = read(part[j])
    z[width:] = -np.inf
    return width


@loop
def change(z, offset, changes):
    """Apply a row's changes to a piece of it; returns False if they have no token of it.

    changes: bitmap of the tokens with a penalty (empty if there are none), the penalty, banned
    tokens.
    """
    bits, penalty, bans = changes
    found, first = False, offset // WORD
    for i in range(min(PIECE // WORD, bits.shape[0] - first)):
        word = bits[first + i]
        if word != 0:
            found = True
            part = z[i * WORD : (i + 1) * WORD]
            for b in range(WORD):
                value = part[b] * penalty if part[b] < 0 else part[b] / penalty
                part[b] = value if (word >> np.uint32(b)) & np.uint32(1) else part[b]
    for i in range(bans.shape[0]):
        j = bans[i] - offset
        if 0 <= j < PIECE:
            found, z[j] = True, -np.inf
    return found


@loop
def changed_logit(row, token, changes, z):
    """The logit of one token of a row after its changes."""
    offset = token // PIECE * PIECE
    load(row, offset, z)
    change(z, offset, changes)
    return z[token - offset]


@loop
def row_peaks(
    row,  # [V]
    changes,
    most,  # [V / PIECE], written: maxima of the changed row's pieces
    z,  # [PIECE], workspace
):
    """Returns the maximum of a row, and that of the changed row."""
    own = highest = type(z[0])(-np.inf)
    for i in range(most.shape[0]):
        load(row, i * PIECE, z)
        largest = peak(z)
        own = max(own, largest)
        if change(z, i * PIECE, changes):
            largest = peak(z)
        most[i] = largest
        highest = max(highest, largest)
    return own, highest


@loop
def scores(of_row, offset, z):
    """Fill z with a piece's scores, 0 at the row's maximum; returns the piece's width.

    of_row: a row [V], its changes, the maximum after them divided by the temperature, and the
    temperature.
    """
    row, changes, highest, temperature = of_row
    width = load(row, offset, z)
    change(z, offset, changes)
    for j in range(PIECE):
        z[j] = z[j] / temperature - highest
    return width


@loop
def row_tokens(
    of_row,  # as in `scores`
    most,  # [V / PIECE], maxima of the changed row's pieces
    least,
    weigh_others,
    token,  # [V], written
    score,  # [V], written
    z,  # [PIECE], workspace
):
    """List a row's tokens with at least the score `least`; returns their number.

    Also returns the mass of the others if `weigh_others`.
    """
    _, _, highest, temperature = of_row
    count, others = 0, type(temperature)(0)
    for i in range(most.shape[0]):
        listed = not most[i] / temperature - highest < least
        if not (listed or weigh_others):
            continue
        offset = i * PIECE
        width = scores(of_row, offset, z)
        inside = 0
        if listed:
            for j in range(PIECE):
                inside += z[j] >= least
        if inside == PIECE:
            # all of them, without a comparison of each
            tokens, values = token[count : count + PIECE], score[count : count + PIECE]
            for j in range(PIECE):
                tokens[j], values[j] = offset + j, z[j]
            count += PIECE
            continue
        if inside > 0:
            for j in range(width):
                token[count], score[count] = offset + j, z[j]
                count += z[j] >= least
        if weigh_others:
            others += others_mass(z, least)
    return count, others


@loop
def others_mass(z, least):
    """Replace a piece's scores by masses, zero from the score `least` on; returns their sum."""
    zero = type(least)(0)
    for j in range(PIECE):
        z[j] = exp(z[j]) if z[j] < least else zero if z[j] == z[j] else z[j]
    return added(z)


@loop
def row_largest(
    of_row,  # as in `scores`
    most,  # [V / PIECE], maxima of the changed row's pieces
    k,
    token,  # [V], written
    score,  # [V], written
    heap,  # [V], workspace
    z,  # [PIECE], workspace
):
    """List a row's k largest tokens and those tied with the last; returns their number."""
    _, _, highest, temperature = of_row
    kind = type(temperature)
    least = kind(ALL)
    if k <= most.shape[0]:
        # k pieces have a token that is at least this large
        least = max(least, kth_largest(most, k, heap) / temperature - highest)
    count, _ = row_tokens(of_row, most, least, False, token, score, z)
    if count > k:
        least = kth_largest(score[:count], k, heap)
        count = keep(token[:count], score, heap, score, least, 0)
    return count


@loop
def rest_token(of_row, low, noise, z):
    """A token below the head, drawn by inverse CDF in token order, with the noise of `draw_row`.

    low: least score of the head.
    """
    V, kind, total = of_row[0].shape[0], type(low), 0.0
    for offset in range(0, V, PIECE):
        scores(of_row, offset, z)
        others_mass(z, low)
        for j in range(PIECE):
            total += z[j]
    target, below = rest_target(noise, kind(total)), 0.0
    last = np.int64(-1)
    for offset in range(0, V, PIECE):
        scores(of_row, offset, z)
        others_mass(z, low)
        for j in range(PIECE):
            below += z[j]
            if z[j] > 0:
                last = offset + j
                if kind(below) > target:
                    return last
    return last


@loop
def rest_moment(of_row, low, z):
    """Sum of -z exp(z) of a row's tokens below its head. low: the head's least score."""
    total = zero = type(low)(0)
    for offset in range(0, of_row[0].shape[0], PIECE):
        scores(of_row, offset, z)
        for j in range(PIECE):
            inside = z[j] < low and z[j] > -np.inf
            z[j] = -z[j] * exp(z[j]) if inside else zero
        total += added(z)
    return total


@loop
def row_log_sum(row, highest, z):
    """log-sum-exp of a row whose maximum is `highest`; z: workspace of the sum's type."""
    total = type(z[0])(0)
    for offset in range(0, row.shape[0], PIECE):
        load(row, offset, z)
        for j in range(PIECE):
            z[j] = exp(z[j] - highest)
        total += added(z)
    return log(total) + highest


@by_threads
def _log_sum(
    part,
    parts,
    shape,  # R, V
    x,  # [R, V]
    out,  # [R], written: log sum exp x
    like,
):
    R, V = shape
    z = np.empty(PIECE, out.dtype)
    first, last = share(R, part, parts)
    for m in range(first, last):
        row, highest = memory(x + m * V * like.itemsize, V, like), z.dtype.type(-np.inf)
        for offset in range(0, V, PIECE):
            load(row, offset, z)
            highest = max(highest, peak(z))
        out[m] = row_log_sum(row, highest, z)


def log_sum(x: torch.Tensor) -> torch.Tensor:
    """log-sum-exp [R] of x [R, V], at least float32, as `log_sum_ref`."""
    x = in_loops(x)
    require(readable(x), "log_sum", x)
    out = torch.empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    _log_sum(x.numel(), tuple(x.shape), x.data_ptr(), out.numpy(), LIKE[x.dtype])
    return out


@loop
def has_nan(row, changes, z):
    """True if a row has a NaN after its changes."""
    found = False
    for offset in range(0, row.shape[0], PIECE):
        load(row, offset, z)
        change(z, offset, changes)
        for j in range(PIECE):
            found |= z[j] != z[j]
    return found


def in_loops(x: torch.Tensor) -> torch.Tensor:
    """Logits as loops read them; float16 is widened to float32, in which it is processed."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()
