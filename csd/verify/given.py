"""Log-probabilities of given tokens by the distribution that rows sample from.

The sampler's own passes compute them, so that in an exact engine they have the bits of sampling.
"""

import torch

from csd.kernels.verify.passes import Passes
from csd.kernels.verify.reference_rows import heads_and_rest, row_logits, sample_rows
from csd.state.filters import drops_tokens, is_greedy
from csd.state.pool import Pool
from csd.state.slots import Slots


def no_token(logits: torch.Tensor) -> torch.Tensor:
    """[R] bool: rows of logits [R, V] that allow no token."""
    return logits.amax(-1) == -torch.inf


def given_chances(
    logits: torch.Tensor,  # [R, V]
    rows: torch.Tensor,  # [R], of the pool
    pool: Pool,
    slots: Slots,
    passes: Passes,
    row: torch.Tensor,  # [T] int64, indices of `logits`
    token: torch.Tensor,  # [T] int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T] of tokens at rows, and log of each row's mass after the filters [R].

    A token that filters or constraints remove, and any token of a row that allows none, has -inf.
    Those of greedy rows are of no use.
    """
    none = no_token(logits)
    if bool(none.any()):
        logits = logits.masked_fill(none[:, None], 0)
    s = pool.slot[rows].long()
    greedy = is_greedy(slots, s)
    total = sample_rows(logits, rows, pool, slots, passes).log_total
    x = row_logits(logits, rows, pool, slots)
    heat = torch.where(greedy, 1.0, slots.temperature[s]).to(total.dtype)
    peak = x.amax(-1).to(heat.dtype) / heat
    chance = x[row, token].to(heat.dtype) / heat[row] - peak[row] - total[row]
    if is_filtered(slots, s):
        chance = torch.where(
            _kept(x, heat, slots, s, greedy, passes, row, token), chance, -torch.inf
        )
    return torch.where(none[row], -torch.inf, chance), total


def is_filtered(slots: Slots, s: torch.Tensor) -> bool:
    """True if a filter of one of the slots s [R] may remove tokens."""
    return bool((drops_tokens(slots, s) & ~is_greedy(slots, s)).any())


def _kept(
    x: torch.Tensor,
    heat: torch.Tensor,
    slots: Slots,
    s: torch.Tensor,
    greedy: torch.Tensor,
    passes: Passes,
    row: torch.Tensor,
    token: torch.Tensor,
) -> torch.Tensor:
    """[T] bool: the filters keep the token at its row; the sampler's heads decide."""
    heads = passes.heads(x, heat, slots, s, greedy)
    same = heads.token[row] == token[:, None]
    passes_filters = (same & (heads.score[row] > -torch.inf)).any(-1)
    # below the head
    rest = (~same.any(-1)).nonzero()[:, 0]
    if rest.shape[0]:
        rows, index = row[rest].unique(return_inverse=True)
        left = heads_and_rest(x[rows], heat[rows], slots, s[rows], greedy[rows])[2]
        passes_filters[rest] = left[index, token[rest]] > 0
    return passes_filters | greedy[row]
