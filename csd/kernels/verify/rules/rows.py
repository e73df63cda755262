"""Rules applied to rows of logits, block by block: biases, banned tokens and penalties.

Bans are of tokens after a row's prefix, penalties on tokens that the prefix already contains; the
formulas are in `csd/kernels/verify/rules/`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from csd.kernels.verify.rules.prefix import Prefixes, path_tokens, prefixes
from csd.kernels.verify.rules.thought import forced_tokens
from csd.state.logit_rules import Asked, Rules, word_edge
from csd.state.pool import Pool
from csd.state.slots import Slots

# rows whose prefixes, counts and bans are in memory at once
BLOCK = 64
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
    bans = torch.zeros(s.shape[0], vocab + 1, dtype=torch.bool, device=s.device)
    if asked.early:
        ban = slots.ban_ids[s].long()
        early = (position < slots.min_new[s])[:, None] & (ban >= 0)
        bans.scatter_(1, torch.where(early, ban, vocab), True)
    if asked.words:
        assert prefix is not None
        _ban_words(bans, prefix, s, rules, vocab)
    if asked.ngram:
        assert prefix is not None
        bans.scatter_(1, _repeats(asked.ngram, prefix, s, rules, vocab), True)
    return bans[:, :vocab]


def _ban_words(
    bans: torch.Tensor, prefix: Prefixes, s: torch.Tensor, rules: Rules, vocab: int
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
        bans.scatter_(1, torch.where(hit < total[:, -1:], ends[end].long(), vocab), True)


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


def penalise(x: torch.Tensor, path: torch.Tensor, s: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Returns rows x [R, V] of slots s [R] with the repetition penalty; path: [R, D].

    A slot's bitmap `seen` has the tokens of its prompt and sample.
    """
    vocab = x.shape[1]
    bit = torch.arange(32, device=x.device)
    bits = ((slots.seen[s][:, :, None] >> bit) & 1).flatten(1)[:, :vocab].bool()
    seen = torch.nn.functional.pad(bits, (0, 1))
    seen.scatter_(1, torch.where(path >= 0, path, vocab), True)
    penalty = slots.repetition_penalty[s].to(x.dtype)[:, None]
    # a slot without a penalty stores no bits, and a penalty of 1 changes nothing
    scaled = torch.where(x < 0, x * penalty, x / penalty)
    return torch.where(seen[:, :vocab] & (penalty != 1), scaled, x)


def subtract_counts(
    x: torch.Tensor, prefix: Prefixes, s: torch.Tensor, rules: Rules
) -> torch.Tensor:
    """Subtracts both penalties from x [R, V] in place and returns x; the prompt does not count."""
    vocab, of = x.shape[1], rules.of[s]
    token = prefix.token[:, prefix.prompt :]
    # counts are whole numbers, so sums are the same in any order
    count = x.new_zeros(x.shape[0], vocab + 1)
    one = torch.ones_like(token, dtype=x.dtype)
    count.scatter_add_(1, torch.where(token >= 0, token, vocab), one)
    count = count[:, :vocab]
    x -= rules.frequency[of].to(x.dtype)[:, None] * count
    x -= rules.presence[of].to(x.dtype)[:, None] * (count > 0)
    return x


class Changed(NamedTuple):
    x: torch.Tensor  # [M, V], float32 at least
    forced: torch.Tensor | None  # [M] int64, a row's only token or -1; x still allows the others


def blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, BLOCK):
        yield slice(start, min(start + BLOCK, rows))


def change_rows(
    logits: torch.Tensor,
    pool: Pool,
    slots: Slots,
    rules: Rules,
    asked: Asked,
    longest: int | None = None,
) -> Changed:
    """Copies logits [M, V] and applies `rules`; longest: most committed tokens of a slot."""
    longest = slots.tokens.shape[1] if longest is None else longest
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    forced = None
    if asked.thought:
        forced = torch.full((pool.rows,), -1, dtype=torch.int64, device=x.device)
    for rows in blocks(pool.rows):
        s = pool.slot[rows].clamp(min=0).long()
        path = path_tokens(pool, rows)
        prefix = prefixes(rows, path, longest, pool, slots, rules) if asked.prefix else None
        part = x[rows]
        if asked.bias:
            part += rules.bias[rules.of[s]] if rules.bias.shape[0] > 1 else rules.bias
        if asked.early or asked.words or asked.ngram:
            position = slots.generated[s] + pool.depth[rows]
            hit = banned(asked, prefix, position, s, slots, rules, x.shape[1])
            part.masked_fill_(hit, -torch.inf)
        if asked.penalty:
            part.copy_(penalise(part, path, s, slots))
        if asked.counts:
            assert prefix is not None
            subtract_counts(part, prefix, s, rules)
        if forced is not None:
            assert prefix is not None
            forced[rows] = forced_tokens(prefix, s, rules)
    return Changed(x, forced)
