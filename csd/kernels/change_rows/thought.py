"""A budget of thought: once it is spent, what ends a thought is all that is left.

A thought is open at a row where what begins one lies later in its prefix than what ends one. The
sample's tokens within thoughts count, those that end it included. Where as many as the budget are
spent and the thought is open, the tokens that close it are forced, one a row, behind the longest
part of them with which the prefix ends already.
"""

import torch

from csd.kernels.change_rows.prefix import Prefixes
from csd.state.rules import ANY, Rules


def forced_tokens(prefix: Prefixes, s: torch.Tensor, rules: Rules) -> torch.Tensor:
    """[R] int64, the only token of each row, -1 where it is free."""
    of = rules.of[s]
    close, budget = rules.close[of].long(), rules.thought[of]
    column = torch.arange(prefix.token.shape[1], device=s.device).expand_as(prefix.token)
    began, ended = (
        torch.where(_completes(prefix, mark[of].long()), column, -1).cummax(1).values
        for mark in (rules.begin, rules.end)
    )
    inside = began > ended
    # the token of a column is within a thought when it is open before it
    within = torch.nn.functional.pad(inside[:, :-1], (1, 0)) & (prefix.token >= 0)
    spent = within[:, prefix.prompt :].sum(-1)
    open_ = inside.gather(1, (prefix.end - 1).clamp(min=0)[:, None])[:, 0]
    token = close.gather(1, _begun(prefix, close)[:, None])[:, 0]
    return torch.where((budget >= 0) & open_ & (spent >= budget), token, -1)


def _completes(prefix: Prefixes, mark: torch.Tensor) -> torch.Tensor:
    """[R, L] bool: whether the tokens up to a column end with mark [R, X], right-aligned."""
    width = mark.shape[1]
    found = prefix.token >= 0
    for k in range(width):
        want = mark[:, width - 1 - k, None]
        found &= (prefix.shifted(k) == want) | (want == ANY)
    return found


def _begun(prefix: Prefixes, close: torch.Tensor) -> torch.Tensor:
    """[R] how many tokens of close [R, X] end the prefix already, the most if there are several."""
    width = close.shape[1]
    last = prefix.last(max(width - 1, 1))
    # [X, X]: of its first k tokens, token i is so far from the prefix's end
    k = torch.arange(width, device=close.device)
    back = k[:, None] - 1 - k[None, :]
    there = last[:, back.clamp(min=0).flatten()].view(-1, width, width)
    equal = ((there == close[:, None]) | (back < 0)).all(-1)
    equal &= k < (close >= 0).sum(-1, keepdim=True)
    return torch.where(equal, k, 0).amax(-1)


def only(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Rows x [R, V], in place: where token [R] is one, it has no others."""
    forced = (token >= 0)[:, None]
    x.masked_fill_(forced, -torch.inf)
    place = token.clamp(min=0)[:, None]
    return x.scatter_(1, place, torch.where(forced, 0, x.gather(1, place)))
