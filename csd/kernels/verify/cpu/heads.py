"""Verification's passes over rows of logits: one finds the head, one computes log-sum-exp."""

import numpy as np
import torch
import torch.nn.functional as F

from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import added, exp, peak
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.verify.passes import HEAD_WIDTH, Heads
from csd.kernels.verify.reference_rows import heads_ref
from csd.state.filters import drops_tokens
from csd.state.slots import Slots

# numbers of a row that are processed at a time
PIECE = 256
# most tokens of a head for which the first pass has room
MAX_HEAD = 1024


@by_threads
def _heads(
    part,
    parts,
    shape,  # R, V, W
    x,  # [R, V]
    temperature,  # [R]
    token,  # [R, W], written
    score,  # [R, W], written
    count,  # [R], written: number of all tokens of the head
    rest,  # [R], written: sum of exp(z) of the other tokens
    like,
):
    R, V, _ = shape
    kind = type(temperature[0])
    first, last = share(R, part, parts)
    for m in range(first, last):
        row, z = memory(x + m * V * like.itemsize, V, like), np.empty(PIECE, kind)
        highest = row_peak(row, z)
        count[m], rest[m] = row_head(row, highest, temperature[m], token[m], score[m], z)


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
    kind = type(out[0])
    first, last = share(R, part, parts)
    for m in range(first, last):
        row, z = memory(x + m * V * like.itemsize, V, like), np.empty(PIECE, kind)
        out[m] = row_log_sum(row, row_peak(row, z), z)


@by_threads
def _typical(
    part,
    parts,
    shape,  # R, V, W
    x,  # [R, V]
    temperature,  # [R]
    typical_p,  # [R], 1 is off
    score,  # [R, W], written: -inf for dropped tokens
    count,  # [R]
    rest,  # [R], written
    deep,  # [R], written: whether the reference must compute the row
    like,
):
    R, V, _ = shape
    kind = type(temperature[0])
    first, last = share(R, part, parts)
    for m in range(first, last):
        if typical_p[m] < 1:
            row, z = memory(x + m * V * like.itemsize, V, like), np.empty(PIECE, kind)
            deep[m] = row_typical(
                row, temperature[m], typical_p[m], score[m, : count[m]], rest[m], z
            )
            rest[m] = 0


@loop
def row_typical(
    row,  # [V]
    temperature,
    typical_p,
    score,  # [W] of the head, written: -inf for dropped tokens
    rest,  # mass of the other tokens
    z,  # [PIECE], workspace of the temperature's type
):
    """Drop tokens of a head as the reference's `_typical`; True if the cut is below the head."""
    kind = type(temperature)
    total, moment = 0.0, 0.0
    for w in range(score.shape[0]):
        total += np.exp(score[w])
        moment -= np.exp(score[w]) * score[w]
    if rest > 0:
        total += rest
        moment += _rest_moment(row, row_peak(row, z), temperature, z)
    mean, target = kind(moment / total), kind(typical_p * total)
    shift, near = np.empty_like(score), 0.0
    for w in range(score.shape[0]):
        shift[w] = abs(score[w] + mean)
        near += np.exp(score[w]) if shift[w] <= kind(HEAD_WIDTH) - mean else 0.0
    if rest > 0 and near < target:
        return True
    reach, mass = kind(np.inf), 0.0
    for w in np.argsort(shift):
        mass += np.exp(score[w])
        if mass >= target:
            reach = shift[w]
            break
    for w in range(score.shape[0]):
        if shift[w] > reach:
            score[w] = -np.inf
    return False


@loop
def _rest_moment(row, most, temperature, z):
    """Sum of -z exp(z) of a row's tokens outside its head."""
    kind = type(temperature)
    low, zero, most = kind(-HEAD_WIDTH), kind(0), most / temperature
    total = zero
    for offset in range(0, row.shape[0], PIECE):
        width = min(PIECE, row.shape[0] - offset)
        part = row[offset : offset + width]
        for j in range(width):
            z[j] = read(part[j]) / temperature - most
        z[width:] = -np.inf
        for j in range(PIECE):
            inside = z[j] < low and z[j] > -np.inf
            z[j] = -z[j] * exp(z[j]) if inside else zero
        total += added(z)
    return total


@loop
def row_head(
    row,  # [V]
    highest,  # its `row_peak`
    temperature,
    token,  # [W], written
    score,  # [W], written
    z,  # [PIECE], workspace of the temperature's type
):
    """Write the first W tokens of a row's head; returns the head's size and the others' mass."""
    kind = type(temperature)
    low, zero = kind(-HEAD_WIDTH), kind(0)
    highest = highest / temperature
    count, total = 0, zero
    for offset in range(0, row.shape[0], PIECE):
        width = min(PIECE, row.shape[0] - offset)
        part = row[offset : offset + width]
        for j in range(width):
            z[j] = read(part[j]) / temperature - highest
        z[width:] = -np.inf
        if not peak(z) < low:
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
def row_log_sum(
    row,  # [V]
    highest,  # its `row_peak`
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
def row_peak(row, z):
    """Maximum of a row; z: [PIECE], workspace."""
    highest = read(row[0])
    for offset in range(0, row.shape[0], PIECE):
        width = min(PIECE, row.shape[0] - offset)
        part = row[offset : offset + width]
        for j in range(width):
            z[j] = read(part[j])
        highest = max(highest, peak(z[:width]))
    return highest


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Logits as loops read them; float16 is widened to float32, in which it is processed."""
    x = x.float() if x.dtype == torch.float16 else x
    require(readable(x), "verify", x)
    return x


def heads(
    x: torch.Tensor, temperature: torch.Tensor, slots: Slots, s: torch.Tensor, greedy: torch.Tensor
) -> Heads:
    """Heads of rows x [R, V], as `heads_ref`, which computes long heads and most filtered rows.

    s: [R], slots of the rows. Heads of more than MAX_HEAD tokens are long. Of the filters,
    typical_p alone has a loop, which leaves rows that it cuts below the head to the reference.
    """
    x = _wide(x)
    R, V = x.shape
    token = torch.empty(R, min(MAX_HEAD, V), dtype=torch.long)
    score, count = torch.empty(token.shape, dtype=temperature.dtype), torch.empty_like(s)
    rest = torch.empty_like(temperature)
    x = x.contiguous()
    _heads(
        x.numel(),
        (R, V, token.shape[1]),
        x.data_ptr(),
        temperature.numpy(),
        token.numpy(),
        score.numpy(),
        count.numpy(),
        rest.numpy(),
        LIKE[x.dtype],
    )
    other = (drops_tokens(slots, s, but="typical_p") & ~greedy) | (count > token.shape[1])
    typical_p = torch.where(greedy | other, 1, slots.typical_p[s]).to(rest.dtype)
    if bool((typical_p < 1).any()):
        deep = torch.zeros_like(other)
        _typical(
            x.numel(),
            (R, V, token.shape[1]),
            x.data_ptr(),
            temperature.numpy(),
            typical_p.numpy(),
            score.numpy(),
            count.numpy(),
            rest.numpy(),
            deep.numpy(),
            LIKE[x.dtype],
        )
        other |= deep
    width = max(int(torch.where(other, 0, count).max()), 1) if R else 1
    hidden = torch.arange(width) >= count[:, None]
    token = token[:, :width].masked_fill_(hidden, V)
    score = score[:, :width].masked_fill_(hidden, -torch.inf)
    if bool(other.any()):
        others = other.nonzero()[:, 0]
        nuclei = heads_ref(x[others], temperature[others], slots, s[others], greedy[others])
        wide = max(nuclei.token.shape[1], width)
        token = F.pad(token, (0, wide - width), value=V)
        score = F.pad(score, (0, wide - width), value=-torch.inf)
        more = (0, wide - nuclei.token.shape[1])
        token[others] = F.pad(nuclei.token, more, value=V)
        score[others] = F.pad(nuclei.score, more, value=-torch.inf)
        rest[others] = nuclei.rest_mass
    return Heads(token, score, rest)


def log_sum(x: torch.Tensor) -> torch.Tensor:
    """log-sum-exp [R] of x [R, V], at least float32, as `log_sum_ref`."""
    x = _wide(x)
    out = torch.empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    x = x.contiguous()
    _log_sum(x.numel(), tuple(x.shape), x.data_ptr(), out.numpy(), LIKE[x.dtype])
    return out
