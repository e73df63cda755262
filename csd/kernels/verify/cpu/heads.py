"""Passes over a row of logits: its changes, its maxima, its head and its log-sum-exp.

A row is processed in pieces of `PIECE` tokens, in a workspace `z` of the type of its
log-probabilities. Its changes are the slot's repetition penalty and its banned end tokens; they are
applied to a piece when it is read, so that no changed copy of the row is made.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import added, exp, peak
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.verify.constants import HEAD_WIDTH
from csd.kernels.verify.cpu.cuts import keep, kth_largest

# numbers of a row that are processed at a time, and tokens in a word of a bitmap
PIECE, WORD = 256, 32
# most tokens of a head for which the loop has room
ROOM = 4096


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
def penalised(value, penalty):
    return value * penalty if value < 0 else value / penalty


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
                value = penalised(part[b], penalty)
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
def scores(row, offset, changes, highest, temperature, z):
    """Fill z with a piece's scores, 0 at the row's maximum; returns the piece's width."""
    width = load(row, offset, z)
    change(z, offset, changes)
    for j in range(PIECE):
        z[j] = z[j] / temperature - highest
    return width


@loop
def row_head(
    row,  # [V]
    changes,
    highest,  # maximum of the changed row, divided by the temperature
    temperature,
    most,  # [V / PIECE], maxima of the changed row's pieces
    token,  # [ROOM], written
    score,  # [ROOM], written
    z,  # [PIECE], workspace
):
    """Write the first tokens of a row's head; returns the head's size and the others' mass."""
    kind = type(temperature)
    low, zero = kind(-HEAD_WIDTH), kind(0)
    count, total = 0, zero
    for i in range(most.shape[0]):
        offset = i * PIECE
        width = scores(row, offset, changes, highest, temperature, z)
        if not most[i] / temperature - highest < low:
            for j in range(width):
                if z[j] >= low:
                    if count < token.shape[0]:
                        token[count], score[count] = offset + j, z[j]
                    count += 1
        for j in range(PIECE):
            z[j] = exp(z[j]) if z[j] < low else zero if z[j] == z[j] else z[j]
        total += added(z)
    return count, total


@loop
def row_largest(
    row,  # [V]
    changes,
    highest,  # maximum of the changed row, divided by the temperature
    temperature,
    most,  # [V / PIECE], maxima of the changed row's pieces
    k,
    token,  # [ROOM], written
    score,  # [ROOM], written
    z,  # [PIECE], workspace
    heap,  # [ROOM], workspace
):
    """Write a row's k largest tokens and those tied with the last; returns their number.

    The result is more than ROOM if there is no room for the ties.
    """
    kind = type(temperature)
    low, count = kind(-np.inf), 0
    if k <= most.shape[0]:
        # k pieces have a token that is at least this large
        low = kth_largest(most, k, heap) / temperature - highest
    for i in range(most.shape[0]):
        if most[i] / temperature - highest < low:
            continue
        offset = i * PIECE
        width = scores(row, offset, changes, highest, temperature, z)
        for j in range(width):
            if z[j] >= low and z[j] > -np.inf:
                if count == token.shape[0]:
                    low = kth_largest(score, k, heap)
                    count = keep(token, score, low)
                    if count == token.shape[0]:
                        return count + 1
                    if z[j] < low:
                        continue
                token[count], score[count] = offset + j, z[j]
                count += 1
    if count > k:
        count = keep(token[:count], score[:count], kth_largest(score[:count], k, heap))
    return count


@loop
def rest_moment(row, changes, highest, temperature, z):
    """Sum of -z exp(z) of a row's tokens outside its head."""
    kind = type(temperature)
    low, zero = kind(-HEAD_WIDTH), kind(0)
    total = zero
    for offset in range(0, row.shape[0], PIECE):
        scores(row, offset, changes, highest, temperature, z)
        for j in range(PIECE):
            inside = z[j] < low and z[j] > -np.inf
            z[j] = -z[j] * exp(z[j]) if inside else zero
        total += added(z)
    return total


@loop
def row_log_sum(
    row,  # [V]
    highest,  # its maximum
    z,  # [PIECE], workspace of the sum's type
):
    """log-sum-exp of a row."""
    total = type(z[0])(0)
    for offset in range(0, row.shape[0], PIECE):
        width = min(PIECE, row.shape[0] - offset)
        part = row[offset : offset + width]
        for j in range(width):
            z[j] = read(part[j]) - highest
        z[width:] = -np.inf
        for j in range(PIECE):
            z[j] = exp(z[j])
        total += added(z)
    return np.log(total) + highest


@loop
def own_log_sum(row, z):
    """log-sum-exp of a row without changes."""
    highest = type(z[0])(-np.inf)
    for offset in range(0, row.shape[0], PIECE):
        load(row, offset, z)
        highest = max(highest, peak(z))
    return row_log_sum(row, highest, z)


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
        out[m] = own_log_sum(memory(x + m * V * like.itemsize, V, like), z)


def log_sum(x: torch.Tensor) -> torch.Tensor:
    """log-sum-exp [R] of x [R, V], at least float32, as `log_sum_ref`."""
    x = in_loops(x)
    require(readable(x), "log_sum", x)
    out = torch.empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    _log_sum(x.numel(), tuple(x.shape), x.data_ptr(), out.numpy(), LIKE[x.dtype])
    return out


def in_loops(x: torch.Tensor) -> torch.Tensor:
    """Logits as loops read them; float16 is widened to float32, in which it is processed."""
    return (x.float() if x.dtype == torch.float16 else x).contiguous()
