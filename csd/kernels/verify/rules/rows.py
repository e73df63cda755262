"""Rules applied to rows of logits, block by block: biases, bans, penalties and forced tokens.

Bans are of tokens after a row's prefix, penalties on tokens that the prefix already contains; the
formulas are in `csd/kernels/verify/rules/`. Prefixes are the end of the prompt, the slot's
committed tokens, and a row's path.

A thought is open at a row if the last begin tag that its sample completes ends after the last end
tag; before either, if the prompt leaves one open (`csd.engine.options.open_thought`). The sample's
tokens inside thoughts are counted, including those of the end tag. If the count has
reached the budget and the thought is open, the closing tokens are forced, one per row, continuing
the longest beginning of them with which the prefix already ends; if it ends with none, but with a
beginning of the end tag, the tokens that complete that tag are forced.

Tags are searched for as `csd.engine.options.thinking` describes: each token has a step

    D' = ((D << k) & within) | suffix,    complete if D & ends, or at symbol `whole`

and two steps are one step, so that log2(symbols of a tag) operations give D after every token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from csd.kernels.verify.reference_rows import penalise
from csd.state.logit_rules import RuleKinds, Rules, word_edge
from csd.state.pool import MAX_DEPTH, Pool, on_path
from csd.state.slots import Slots


@dataclass(slots=True)
class Prefixes:
    """Prefixes of R rows. The first P columns are the prompt's; unused columns hold -1."""

    token: torch.Tensor  # [R, L] int64
    end: torch.Tensor  # [R] int64, the column after the prefix
    prompt: int  # P

    def last(self, count: int) -> torch.Tensor:
        """[R, count] int64, the last tokens, latest first; -1 where there are fewer."""
        index = self.end[:, None] - 1 - torch.arange(count, device=self.token.device)
        tokens = self.token.gather(1, index.clamp(min=0))
        return torch.where(index >= 0, tokens, -1)


def path_tokens(pool: Pool, rows: slice, drafted: bool = True) -> torch.Tensor:
    """[R, MAX_DEPTH] int64: drafted tokens on each row's path, by depth from 1; -1 after them.

    A root is committed, so it is not included. drafted: False if all rows are roots.
    """
    count, device = pool.slot[rows].shape[0], pool.token.device
    if not drafted:
        return torch.full((count, MAX_DEPTH), -1, dtype=torch.int64, device=device)
    # an extra column after the last receives tokens that are not on the path
    drafted_on_path = on_path(pool, rows) & (pool.depth > 0)
    column = torch.where(drafted_on_path, pool.depth.long() - 1, MAX_DEPTH)
    tokens = torch.full((count, MAX_DEPTH + 1), -1, dtype=torch.int64, device=device)
    return tokens.scatter_(1, column, pool.token.long().expand_as(column))[:, :-1]


def prefixes(
    rows: slice, path: torch.Tensor, longest: int, pool: Pool, slots: Slots, rules: Rules
) -> Prefixes:
    """Prefixes of the pool's `rows` with their `path`; longest: most committed tokens of a slot."""
    s = pool.slot[rows].clamp(min=0).long()
    P, device = rules.prompt.shape[1], path.device
    committed = slots.tokens[s, :longest].long()
    generated = slots.generated[s].long()[:, None]
    # tokens that earlier samples left in the slot are not this sample's
    fresh = torch.arange(longest, device=device) < generated
    committed = torch.where(fresh, committed, -1)
    token = torch.cat([rules.prompt[s].long(), committed, torch.full_like(path, -1)], 1)
    token.scatter_(1, P + generated + torch.arange(path.shape[1], device=device), path)
    return Prefixes(token, P + generated[:, 0] + pool.depth[rows].long(), P)


# larger than the symbols of a token
SYMBOLS = 1 << 20


def forced_tokens(prefix: Prefixes, s: torch.Tensor, rules: Rules) -> torch.Tensor:
    """[R] int64: the only token of each row, -1 if it is free."""
    of = rules.of[s]
    close, budget = rules.close[of].long(), rules.thought[of]
    column = torch.arange(prefix.token.shape[1], device=s.device)
    own = column >= prefix.prompt
    (began, _), (ended, state) = (_search(prefix, of, rules, tag) for tag in (0, 1))
    began, ended = (
        torch.where((index > 0) & own, column * SYMBOLS + index, -1).cummax(1).values
        for index in (began, ended)
    )
    # of the prompt only the thought counts that it leaves open: its other tags are mentions
    before = torch.maximum(began, ended) < 0
    inside = torch.where(before, rules.opened[s][:, None], began > ended)
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


# rows whose prefixes, counts and bans are in memory at once
BLOCK = 64
# banned tokens per row that are written at once
HITS = 64


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


# the penalties do not depend on x, so the gradient passes unchanged; that of the scatter would
# count a token once for each of its occurrences
@torch.no_grad()
def subtract_counts(
    x: torch.Tensor, prefix: Prefixes, s: torch.Tensor, rules: Rules
) -> torch.Tensor:
    """Subtracts both penalties from x [R, V] in place and returns x; the prompt does not count."""
    vocab, of = x.shape[1], rules.of[s]
    token = prefix.token[:, prefix.prompt :]
    # counts are whole numbers, so sums are the same in any order; no other token's is read
    count = x.new_empty(x.shape[0], vocab + 1)
    index = torch.where(token >= 0, token, vocab)
    count.scatter_(1, torch.nn.functional.pad(index, (0, 1)), 0)
    count.scatter_add_(1, index, torch.ones_like(token, dtype=x.dtype))
    # the sample's tokens alone change; where there is none, token 0 gets what is its own
    token = token.clamp(min=0)
    count = count.gather(1, token)
    logit = x.gather(1, token) - rules.frequency[of].to(x.dtype)[:, None] * count
    logit -= rules.presence[of].to(x.dtype)[:, None] * (count > 0)
    return x.scatter_(1, token, logit)


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
    asked: RuleKinds,
    longest: int | None = None,
    drafted: bool = True,
) -> Changed:
    """Copies logits [M, V] and applies `rules`.

    longest: most committed tokens of a slot. drafted: False if all rows are roots.
    """
    longest = slots.tokens.shape[1] if longest is None else longest
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    forced, vocab = None, x.shape[1]
    if asked.thought:
        forced = torch.full((pool.rows,), -1, dtype=torch.int64, device=x.device)
    for rows in blocks(pool.rows):
        s = pool.slot[rows].clamp(min=0).long()
        prefix: Any = None
        if asked.prefix or asked.penalty:
            path = path_tokens(pool, rows, drafted)
        if asked.prefix:
            prefix = prefixes(rows, path, longest, pool, slots, rules)
        part = x[rows]
        if asked.bias:
            part += rules.bias[rules.of[s]] if rules.bias.shape[0] > 1 else rules.bias
        if asked.early or asked.words or asked.ngram:
            # an extra column after the vocabulary receives entries that are no token
            bans = torch.zeros(s.shape[0], vocab + 1, dtype=torch.bool, device=x.device)
            if asked.early:
                ban = slots.ban_ids[s].long()
                early = slots.generated[s] + pool.depth[rows] < slots.min_new[s]
                bans.scatter_(1, torch.where(early[:, None] & (ban >= 0), ban, vocab), True)
            if asked.words:
                _ban_words(bans, prefix, s, rules, vocab)
            if asked.ngram:
                bans.scatter_(1, _repeats(asked.ngram, prefix, s, rules, vocab), True)
            part.masked_fill_(bans[:, :vocab], -torch.inf)
        if asked.penalty:
            part.copy_(penalise(part, path, s, slots))
        if asked.counts:
            subtract_counts(part, prefix, s, rules)
        if forced is not None:
            forced[rows] = forced_tokens(prefix, s, rules)
    return Changed(x, forced)
