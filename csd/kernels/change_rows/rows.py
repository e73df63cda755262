"""Apply the rules to rows of logits, block by block."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from csd.kernels.change_rows.bans import banned
from csd.kernels.change_rows.penalties import penalise, subtract_counts
from csd.kernels.change_rows.prefix import path_tokens, prefixes
from csd.kernels.change_rows.thought import forced_tokens
from csd.state.logit_rules import Asked, Rules
from csd.state.pool import Pool
from csd.state.slots import Slots

# rows whose prefixes, counts and bans are in memory at once
BLOCK = 64


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
