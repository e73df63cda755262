"""Tokens that are banned after a row's prefix."""

import torch

from csd.kernels.change_rows.prefix import Prefixes
from csd.state.logit_rules import ANY, Asked, Rules
from csd.state.slots import Slots


def banned(
    asked: Asked,
    prefix: Prefixes | None,
    position: torch.Tensor,
    s: torch.Tensor,
    slots: Slots,
    rules: Rules,
    vocab: int,
) -> torch.Tensor:
    """[R, V] bool: banned tokens of rows of slots s [R] at generated positions [R]."""
    # an extra column after the vocabulary receives entries that are no token
    found = torch.zeros(s.shape[0], vocab + 1, dtype=torch.bool, device=s.device)
    if asked.early:
        ban = slots.ban_ids[s].long()
        early = (position < slots.min_new[s])[:, None] & (ban >= 0)
        found.scatter_(1, torch.where(early, ban, vocab), True)
    if asked.words:
        assert prefix is not None
        found.scatter_(1, _last_of_words(prefix, s, rules, vocab), True)
    if asked.ngram:
        assert prefix is not None
        found.scatter_(1, _repeats(asked.ngram, prefix, s, rules, vocab), True)
    return found[:, :vocab]


def _last_of_words(prefix: Prefixes, s: torch.Tensor, rules: Rules, vocab: int) -> torch.Tensor:
    """[R, B]: last token of each banned sequence whose other tokens end the prefix, else V."""
    words = rules.words[rules.of[s]].long()
    # [R, 1, W - 1], oldest first as the words are
    before = prefix.last(words.shape[2] - 1).flip(1)[:, None]
    ends = ((words[:, :, :-1] == before) | (words[:, :, :-1] == ANY)).all(-1)
    last = words[:, :, -1]
    return torch.where(ends & (last >= 0), last, vocab)


def _repeats(
    longest: int, prefix: Prefixes, s: torch.Tensor, rules: Rules, vocab: int
) -> torch.Tensor:
    """[R, L]: tokens that followed an earlier copy of the prefix's last n - 1 tokens, else V."""
    n = rules.ngram[rules.of[s]][:, None]
    followed = (prefix.token >= 0) & (n > 0)
    last = prefix.last(max(longest - 1, 1))
    for k in range(1, longest):
        before = prefix.shifted(k)
        followed &= ((before == last[:, k - 1 : k]) & (before >= 0)) | (k >= n)
    return torch.where(followed, prefix.token, vocab)
