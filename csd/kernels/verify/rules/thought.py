"""Budget of thought: once it is spent, only the tokens that close the thought are allowed.

A thought is open at a row if the last begin tag in its prefix ends after the last end tag. The
sample's tokens inside thoughts are counted, including those of the end tag. If the count has
reached the budget and the thought is open, the closing tokens are forced, one per row, continuing
the longest beginning of them with which the prefix already ends; if it ends with none, but with a
beginning of the end tag, the tokens that complete that tag are forced.

Tags are searched for as `csd.engine.options.thought_tags` describes: each token has a step

    D' = ((D << k) & within) | suffix,    complete if D & ends, or at symbol `whole`

and two steps are one step, so that log2(symbols of a tag) operations give D after every token.
"""

import torch

from csd.kernels.verify.rules.prefix import Prefixes
from csd.state.logit_rules import Rules

# larger than the symbols of a token
SYMBOLS = 1 << 20


def forced_tokens(prefix: Prefixes, s: torch.Tensor, rules: Rules) -> torch.Tensor:
    """[R] int64: the only token of each row, -1 if it is free."""
    of = rules.of[s]
    close, budget = rules.close[of].long(), rules.thought[of]
    column = torch.arange(prefix.token.shape[1], device=s.device)
    (began, _), (ended, state) = (_search(prefix, of, rules, tag) for tag in (0, 1))
    began, ended = (
        torch.where(index > 0, column * SYMBOLS + index, -1).cummax(1).values
        for index in (began, ended)
    )
    inside = began > ended
    # the token of a column is within a thought if one is open before the column
    within = torch.nn.functional.pad(inside[:, :-1], (1, 0)) & (prefix.token >= 0)
    spent = within[:, prefix.prompt :].sum(-1)
    last = (prefix.end - 1).clamp(min=0)[:, None]
    open_ = inside.gather(1, last)[:, 0]
    begun = _begun(prefix, close)
    token = close.gather(1, begun[:, None])[:, 0]
    # the number of the end tag's symbols with which the prefix ends: the highest bit of its state
    symbols = state.gather(1, last).clamp(min=1).double().log2().long()
    rest = rules.rests[of].long().gather(1, symbols)[:, 0]
    token = torch.where((begun == 0) & (symbols[:, 0] > 0) & (rest >= 0), rest, token)
    return torch.where((budget >= 0) & open_ & (spent >= budget), token, -1)


def _search(
    prefix: Prefixes, of: torch.Tensor, rules: Rules, tag: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, L] int32 twice: symbols of a token up to where it completes a tag, else 0; and D."""
    token, (_, _, fields, kinds) = prefix.token, rules.tag_steps.shape
    row = (of * 2 + tag)[:, None]
    # tables are read by one index each, which is far faster than by several
    index = row * rules.tag_kinds.shape[2] + token.clamp(min=0)
    kind = _take(rules.tag_kinds.flatten(), index).long()
    index = row * (fields * kinds) + torch.where(token >= 0, kind, 0)
    steps = rules.tag_steps.flatten()
    k, within, suffix, ends, whole = (_take(steps[f * kinds :], index) for f in range(fields))
    reach = 1
    while reach < rules.rests.shape[1]:
        # the steps of `reach` tokens joined to those of as many before them; where no bit is kept,
        # k may be anything
        of_last, bits = k[:, reach:], within[:, reach:]
        first = suffix[:, :reach], torch.zeros_like(within[:, :reach]), k[:, :reach]
        suffix = torch.cat(
            [first[0], ((suffix[:, :-reach] << of_last) & bits) | suffix[:, reach:]], 1
        )
        within = torch.cat([first[1], (within[:, :-reach] << of_last) & bits], 1)
        k = torch.cat([first[2], k[:, :-reach] + of_last], 1)
        reach *= 2
    ends = torch.nn.functional.pad(suffix[:, :-1], (1, 0)) & ends
    # the completion that uses most of the token is that of the lowest bit; floats of single bits
    # are exact
    lowest = (ends & -ends).clamp(min=1).float().log2().round().int()
    length = rules.tag_length[of, tag][:, None].int()
    return torch.maximum(whole, torch.where(ends > 0, length - lowest, 0)), suffix


def _take(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index.flatten()).view(index.shape)


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
    column = token.clamp(min=0)[:, None]
    return x.scatter_(1, column, torch.where(forced, 0, x.gather(1, column)))
