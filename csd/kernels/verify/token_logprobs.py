"""Log-probabilities of given tokens by the distribution that rows sample from.

The sampler's own operations compute them, so that in an exact engine they have the bits of
sampling: the reference's here, a CPU's loop in `cpu/path.py`, and a GPU's sampling kernel in
`triton/launch.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from csd.kernels.verify.reference_rows import (
    heads_and_rest,
    log_sum_ref,
    row_logits,
    sample_rows,
)
from csd.kernels.verify.rules.rows import blocks
from csd.state.filters import CUTS, is_greedy
from csd.state.pool import Pool, model_row
from csd.state.slots import Slots


class TokenLogprobs(NamedTuple):
    """Values of T tokens at rows of a pool of M rows."""

    logprob: torch.Tensor  # [T], processed distribution; the raw one if greedy
    raw_logprob: torch.Tensor  # [T], the model's own
    bad: torch.Tensor  # [M] bool, a logit of the row is NaN or +inf; false of rows without tokens


def token_logprobs_ref(
    logits: torch.Tensor,  # [M, V], or [R, V] of the rows of `pool.texts`
    pool: Pool,
    slots: Slots,
    row: torch.Tensor,  # [T] int64, of the pool
    token: torch.Tensor,  # [T] int64
) -> TokenLogprobs:
    """Values of tokens at rows. A token that filters remove has logprob -inf, as does any token
    of a row that allows none."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprob, raw = (torch.empty(row.shape, dtype=wide, device=row.device) for _ in range(2))
    bad = torch.zeros(pool.rows, dtype=torch.bool, device=row.device)
    each, index = row.unique(return_inverse=True)
    for block in blocks(len(each)):
        pairs = ((index >= block.start) & (index < block.stop)).nonzero()[:, 0]
        rows, at = each[block], index[pairs] - block.start
        part = logits[model_row(pool, rows)]
        raw[pairs] = raw_logprobs(part, log_sum_ref, at, token[pairs])
        chance, bad[rows] = _chances(part, rows, pool, slots, at, token[pairs])
        greedy = is_greedy(slots, pool.slot[row[pairs]].long())
        logprob[pairs] = torch.where(greedy, raw[pairs], chance)
    return TokenLogprobs(logprob, raw, bad)


def raw_logprobs(
    logits: torch.Tensor, log_sum: Callable, row: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities [T] of tokens at rows of logits [R, V], at least float32.

    log_sum: the backend's, so that the bits are those of its sampling.
    """
    total = log_sum(logits)
    return logits[row, token].to(total.dtype) - total[row]


def no_token(logits: torch.Tensor) -> torch.Tensor:
    """[R] bool: rows of logits [R, V] that allow no token."""
    return logits.amax(-1) == -torch.inf


def _chances(
    logits: torch.Tensor,  # [R, V]
    rows: torch.Tensor,  # [R], of the pool
    pool: Pool,
    slots: Slots,
    row: torch.Tensor,  # [T] int64, indices of `logits`
    token: torch.Tensor,  # [T] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T] of tokens at rows that are not greedy, and bad rows [R] bool."""
    none = no_token(logits)
    if bool(none.any()):
        logits = logits.masked_fill(none[:, None], 0)
    s = pool.slot[rows].long()
    greedy = is_greedy(slots, s)
    total = sample_rows(logits, rows, pool, slots).log_total
    x = row_logits(logits, rows, pool, slots)
    heat = torch.where(greedy, 1.0, slots.temperature[s]).to(total.dtype)
    peak = x.amax(-1).to(heat.dtype) / heat
    chance = x[row, token].to(heat.dtype) / heat[row] - peak[row] - total[row]
    if is_filtered(slots, s):
        _, heads, rest = heads_and_rest(x, heat, slots, s, greedy)
        same = (heads.token[row] == token[:, None]) & (heads.score[row] > -torch.inf)
        passed = same.any(-1) | (rest[row, token] > 0) | greedy[row]
        chance = torch.where(passed, chance, -torch.inf)
    return torch.where(none[row], -torch.inf, chance), ~total.isfinite()


def filtered_ref(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Probabilities [R, V] of rows x [R, V], at least float32, after the filters of slots [R].

    x: logits that the slots' other options have changed already. No slot is greedy.
    """
    s = torch.arange(len(x), device=x.device)
    heat = slots.temperature[s].to(x.dtype)
    _, heads, rest = heads_and_rest(x, heat, slots, s, torch.zeros_like(s, dtype=torch.bool))
    # an extra column for the padding of heads
    p = torch.nn.functional.pad(rest, (0, 1))
    p.scatter_(1, heads.token, heads.score.exp())
    p = p[:, :-1]
    return p.div_(p.sum(-1, keepdim=True))


def is_filtered(slots: Slots, s: torch.Tensor) -> bool:
    """True if a filter of one of the slots s [R] may remove tokens."""
    dropping = torch.stack([getattr(slots, name)[s] != off for name, off in CUTS.items()]).any(0)
    # in a greedy row filters could only choose among equal tokens
    return bool((dropping & ~is_greedy(slots, s)).any())
