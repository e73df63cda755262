"""Steps around the verification of changed rows: empty rows, the model's own log-probabilities."""

from collections.abc import Callable

import torch

from csd.kernels.verify.reference_rows import log_sum_ref, own_chance
from csd.kernels.verify.rules.rows import blocks
from csd.state.filters import is_greedy
from csd.state.logit_rules import Rules
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict


def keep_full(
    x: torch.Tensor, logits: torch.Tensor, static: bool = True, teacher_forced: bool = False
) -> torch.Tensor | None:
    """Replaces rows of x [M, V] from which no token can be drawn by those of the logits, in place.

    Such a row is no error if it is off all paths, and on a path it must still draw a token. static:
    whether nothing may be read on the host. teacher_forced: True if the tokens are input rather
    than drawn; rows that allow no token then stay. Returns [M] int32: 1 for a row that allows no
    token, -1 for one with a logit that is NaN or +inf, else 0. None, unless static, for only zeros.
    """
    peak = x.amax(-1)
    none = peak == -torch.inf
    if teacher_forced:
        none = torch.zeros_like(none)
    odd = peak.isnan() | (peak == torch.inf)
    short = none.int() - odd.int()
    if not static and not bool((short != 0).any()):
        return None
    for rows in blocks(x.shape[0]):
        x[rows] = torch.where(short[rows, None] != 0, logits[rows].to(x.dtype), x[rows])
    return short


def finish_rows(
    verdict: Verdict,
    logits: torch.Tensor,
    short: torch.Tensor | None,
    pool: Pool,
    slots: Slots,
    rules: Rules,
    log_sum: Callable = log_sum_ref,
    static: bool = True,
) -> None:
    """Write the model's own log-probabilities and the bad slots of a verdict on changed rows.

    logits: [M, V] of the model; short: [M], result of `keep_full`: such rows are errors on a path,
    and the first one's place, with its sign, is written to the rules. log_sum: the backend's.
    static: whether nothing may be read on the host; else only rows on the paths are computed.
    """
    valid = verdict.accept_row >= 0
    row = verdict.accept_row.clamp(min=0).long()
    if short is not None:
        empty = torch.where(valid, short[row], 0)
        first = (empty != 0).int().argmax(-1)
        position = (slots.generated + first + 1) * empty.gather(1, first[:, None])[:, 0]
        rules.empty.copy_(torch.where(rules.empty == 0, position, rules.empty))
        verdict.bad |= position != 0
    if static:
        M = pool.rows
        position = torch.where(valid, row, M).flatten()
        on_path = torch.zeros(M + 1, dtype=torch.bool, device=row.device)
        on_path = on_path.scatter_(0, position, True)[:M]
        parts = blocks(M)
        every = [own_chance(logits[part], verdict.sample[part], log_sum) for part in parts]
        verdict.raw_logprob.copy_(torch.where(on_path, torch.cat(every), 0))
    else:
        rows = row[valid]
        verdict.raw_logprob.zero_()
        raw = own_chance(logits[rows], verdict.sample[rows], log_sum)
        verdict.raw_logprob[rows] = raw.to(verdict.raw_logprob.dtype)
    greedy = is_greedy(slots, pool.slot.clamp(min=0).long())
    verdict.logprob.copy_(torch.where(greedy, verdict.raw_logprob, verdict.logprob))
