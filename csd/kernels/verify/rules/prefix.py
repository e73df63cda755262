"""Tokens before each row: the end of its prompt, its slot's committed tokens, and its path."""

from dataclasses import dataclass

import torch

from csd.state.logit_rules import Rules
from csd.state.pool import MAX_DEPTH, Pool
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

    def shifted(self, by: int) -> torch.Tensor:
        """[R, L]: the token `by` places before each one, -1 if there is none."""
        if by == 0:
            return self.token
        # an n-gram or a mark may be longer than all prefixes
        length = max(self.token.shape[1] - by, 0)
        pad = self.token.shape[1] - length, 0
        return torch.nn.functional.pad(self.token[:, :length], pad, value=-1)


def path_tokens(pool: Pool, rows: slice) -> torch.Tensor:
    """[R, MAX_DEPTH] int64: drafted tokens on each row's path, by depth from 1; -1 after them.

    A root is committed, so it is not included.
    """
    device = pool.token.device
    s = pool.slot[rows].clamp(min=0).long()
    # [R, M]: column j is on the path of row m
    node = torch.arange(pool.rows, device=device) - pool.slot_start[s].long()[:, None]
    same = (pool.slot[rows, None] == pool.slot) & (pool.slot[rows, None] >= 0)
    above = (pool.ancestors[rows, None] >> node.clamp(0, 63)) & 1
    drafted = same & (above == 1) & (pool.depth > 0)
    # an extra column after the last receives tokens that are not on the path
    column = torch.where(drafted, pool.depth.long() - 1, MAX_DEPTH)
    tokens = torch.full((s.shape[0], MAX_DEPTH + 1), -1, dtype=torch.int64, device=device)
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
