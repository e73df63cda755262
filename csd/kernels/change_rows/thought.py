"""Budget of thought: once it is spent, only the tokens that close the thought are allowed.

A thought is open at a row if the last begin mark in its prefix is after the last end mark. The
sample's tokens inside thoughts are counted, including those of the end mark. If the count has
reached the budget and the thought is open, the closing tokens are forced, one per row, continuing
the longest beginning of them with which the prefix already ends.
"""

import torch

from csd.kernels.change_rows.prefix import Prefixes
from csd.state.logit_rules import ANY, Rules


def forced_tokens(prefix: Prefixes, s: torch.Tensor, rules: Rules) -> torch.Tensor:
    """[R] int64: the only token of each row, -1 if it is free."""
    of = rules.of[s]
    close, budget = rules.close[of].long(), rules.thought[of]
    column = torch.arange(prefix.token.shape[1], device=s.device).expand_as(prefix.token)
    began, ended = (
        torch.where(_completes(prefix, mark[of].long()), column, -1).cummax(1).values
        for mark in (rules.begin, rules.end)
    )
    inside = began > ended
    # the token of a column is within a thought if one is open before the column
    within = torch.nn.functional.pad(inside[:, :-1], (1, 0)) & (prefix.token >= 0)
    spent = within[:, prefix.prompt :].sum(-1)
    open_ = inside.gather(1, (prefix.end - 1).clamp(min=0)[:, None])[:, 0]
    token = close.gather(1, _begun(prefix, close)[:, None])[:, 0]
    return torch.where((budget >= 0) & open_ & (spent >= budget), token, -1)


def _completes(prefix: Prefixes, mark: torch.Tensor) -> torch.Tensor:
    """[R, L] bool: the tokens up to each column end with mark [R, X], which is right-aligned."""
    width = mark.shape[1]
    found = prefix.token >= 0
    for k in range(width):
        want = mark[:, width - 1 - k, None]
        found &= (prefix.shifted(k) == want) | (want == ANY)
    return found


def _begun(prefix: Prefixes, close: torch.Tensor) -> torch.Tensor:
    """[R]: largest number of first tokens of close [R, X] with which the prefix already ends."""
    width = close.shape[1]
    last = prefix.last(max(width - 1, 1))
    # [X, X]: distance of token i from the prefix's end, if the first k tokens end it
    k = torch.arange(width, device=close.device)
    back = k[:, None] - 1 - k[None, :]
    there = last[:, back.clamp(min=0).flatten()].view(-1, width, width)
    equal = ((there == close[:, None]) | (back < 0)).all(-1)
    equal &= k < (close >= 0).sum(-1, keepdim=True)
    return torch.where(equal, k, 0).amax(-1)


def only(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Makes token [R], unless it is -1, the only one of its row of x [R, V], in place."""
    forced = (token >= 0)[:, None]
    x.masked_fill_(forced, -torch.inf)
    place = token.clamp(min=0)[:, None]
    return x.scatter_(1, place, torch.where(forced, 0, x.gather(1, place)))
