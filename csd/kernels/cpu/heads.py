"""Verification's passes over whole rows of logits: one to find a row's head, one for its sum."""

import numpy as np
import torch
import torch.nn.functional as F

from csd.kernels.cpu.numbers import DTYPES, added, array, exp, loop, peak, read
from csd.kernels.verify.constants import HEAD_WIDTH
from csd.kernels.verify.reference_rows import Heads, Passes, heads_ref, log_sum_ref
from csd.state.slots import Slots

# numbers of a row at a time
PIECE = 256
# tokens of a head that a first look has room for
MOST = 1024


@loop
def _heads(
    x,  # [R, V]
    temperature,  # [R]
    token,  # [R, W], written
    score,  # [R, W], written
    count,  # [R], written: the head's tokens, all of them
    rest,  # [R], written: sum of exp of the others
):
    kind = type(temperature[0])
    low, zero = kind(-HEAD_WIDTH), kind(0)
    z = np.empty(PIECE, kind)
    V, W = x.shape[1], token.shape[1]
    for m in range(x.shape[0]):
        most = _peak(x[m], z) / temperature[m]
        found, total = 0, zero
        for at in range(0, V, PIECE):
            width = min(PIECE, V - at)
            z[width:] = -np.inf
            part = x[m, at : at + width]
            for j in range(width):
                z[j] = read(part[j]) / temperature[m] - most
            if not peak(z) < low:
                for j in range(width):
                    if z[j] >= low:
                        if found < W:
                            token[m, found], score[m, found] = at + j, z[j]
                        found += 1
            for j in range(PIECE):
                z[j] = exp(z[j]) if z[j] < low else zero if z[j] == z[j] else z[j]
            total += added(z)
        count[m] = found
        rest[m] = total


@loop
def _log_sum(x, out):
    """out [R] = log sum exp(x [R, V])"""
    kind = type(out[0])
    z = np.empty(PIECE, kind)
    V = x.shape[1]
    for m in range(x.shape[0]):
        most = _peak(x[m], z)
        total = kind(0)
        for at in range(0, V, PIECE):
            width = min(PIECE, V - at)
            z[width:] = -np.inf
            part = x[m, at : at + width]
            for j in range(width):
                z[j] = read(part[j]) - most
            for j in range(PIECE):
                z[j] = exp(z[j])
            total += added(z)
        out[m] = np.log(total) + most


@loop
def _peak(row, z):
    """The largest of a row; z: [PIECE] to work in."""
    most = read(row[0])
    for at in range(0, row.shape[0], PIECE):
        width = min(PIECE, row.shape[0] - at)
        part = row[at : at + width]
        for j in range(width):
            z[j] = read(part[j])
        most = max(most, peak(z[:width]))
    return most


def heads(
    x: torch.Tensor, temperature: torch.Tensor, slots: Slots, s: torch.Tensor, greedy: torch.Tensor
) -> Heads:
    """`heads_ref`, of rows that have filters or long heads as it does."""
    if x.dtype not in DTYPES:
        return heads_ref(x, temperature, slots, s, greedy)
    R, V = x.shape
    token = torch.empty(R, min(MOST, V), dtype=torch.long)
    score, count = torch.empty(token.shape, dtype=temperature.dtype), torch.empty_like(s)
    rest = torch.empty_like(temperature)
    _heads(
        array(x.contiguous()), temperature.numpy(), token.numpy(), score.numpy(), count.numpy(),
        rest.numpy(),
    )  # fmt: skip
    other = (slots.top_k[s] > 0) | (slots.top_p[s] < 1) | (slots.min_p[s] > 0)
    other = (other & ~greedy) | (count > token.shape[1])
    width = max(int(torch.where(other, 0, count).max()), 1) if R else 1
    hidden = torch.arange(width) >= count[:, None]
    token = token[:, :width].masked_fill_(hidden, V)
    score = score[:, :width].masked_fill_(hidden, -torch.inf)
    if bool(other.any()):
        at = other.nonzero()[:, 0]
        found = heads_ref(x[at], temperature[at], slots, s[at], greedy[at])
        wide = max(found.token.shape[1], width)
        token = F.pad(token, (0, wide - width), value=V)
        score = F.pad(score, (0, wide - width), value=-torch.inf)
        more = (0, wide - found.token.shape[1])
        token[at] = F.pad(found.token, more, value=V)
        score[at] = F.pad(found.score, more, value=-torch.inf)
        rest[at] = found.rest_mass
    return Heads(token, score, rest)


def log_sum(x: torch.Tensor) -> torch.Tensor:
    """`log_sum_ref`."""
    if x.dtype not in DTYPES:
        return log_sum_ref(x)
    out = torch.empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    _log_sum(array(x.contiguous()), out.numpy())
    return out


PASSES = Passes(heads, log_sum)
