"""Tokens that are banned after a row's prefix."""

import torch

from csd.kernels.change_rows.prefix import Prefixes
from csd.state.logit_rules import Asked, Rules, word_edge
from csd.state.slots import Slots

# banned tokens per row that are written at once
HITS = 64


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
        _ban_words(found, prefix, s, rules, vocab)
    if asked.ngram:
        assert prefix is not None
        found.scatter_(1, _repeats(asked.ngram, prefix, s, rules, vocab), True)
    return found[:, :vocab]


def _ban_words(
    found: torch.Tensor, prefix: Prefixes, s: torch.Tensor, rules: Rules, vocab: int
) -> None:
    """Sets found [R, V + 1] at the last token of each banned sequence whose others end the prefix.

    Each row walks its set's tree from the prefix's last token backwards. Tokens are then written
    HITS at a time, so temporary memory depends neither on the number of sets nor on their size.
    """
    (E, B), of = (rules.word_edges.shape[1], rules.word_ends.shape[1]), rules.of[s]
    edges, starts, ends = (
        x.flatten() for x in (rules.word_edges, rules.word_starts, rules.word_ends)
    )
    before = prefix.last(max(rules.word - 1, 1))
    node, inside = torch.zeros_like(of), torch.ones_like(of, dtype=torch.bool)
    first, count = torch.zeros_like(before), torch.zeros_like(before)
    for k in range(rules.word - 1):
        key = word_edge(of, node, before[:, k], E, vocab)
        edge = torch.searchsorted(edges, key).clamp(max=edges.shape[0] - 1)
        inside = inside & (before[:, k] >= 0) & (edges[edge] == key)
        node = torch.where(inside, edge - of * E + 1, 0)
        # node n has the ends from starts[n] to starts[n + 1], and the root has none
        start = of * (E + 2) + node
        first[:, k], count[:, k] = starts[start], starts[start + 1] - starts[start]
    total = count.cumsum(1)
    for low in range(0, rules.word_hits, HITS):
        hit = torch.arange(low, min(low + HITS, rules.word_hits), device=s.device)
        hit = hit.expand(s.shape[0], -1).contiguous()
        depth = torch.searchsorted(total, hit, right=True).clamp(max=total.shape[1] - 1)
        end = first.gather(1, depth) + hit - (total - count).gather(1, depth)
        end = of[:, None] * B + end.clamp(0, B - 1)
        found.scatter_(1, torch.where(hit < total[:, -1:], ends[end].long(), vocab), True)


def _repeats(
    longest: int, prefix: Prefixes, s: torch.Tensor, rules: Rules, vocab: int
) -> torch.Tensor:
    """[R, L]: tokens that followed an earlier copy of the prefix's last n - 1 tokens, else V."""
    n = rules.ngram[rules.of[s]][:, None]
    followed = (prefix.token >= 0) & (n > 0)
    # -2 equals no token, so that absent ones do not equal each other
    last = prefix.last(max(longest - 1, 1))
    last = torch.where(last >= 0, last, -2)
    for k in range(1, longest):
        # columns without k tokens before them
        followed[:, :k] &= k >= n
        followed[:, k:] &= (prefix.token[:, :-k] == last[:, k - 1 : k]) | (k >= n)
    return torch.where(followed, prefix.token, vocab)
