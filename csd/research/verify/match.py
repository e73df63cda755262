"""Sample the target and compare the token with the drafts: the default verifier.

    token ~ q,  draft = the first k with x_k = token
    acceptance = sum over y of q(y) (1 - prod over k of (1 - p_k(y)))        independent drafts
               = q(drafts)                                                   fixed drafts

Drafts never change the token, so any drafts are allowed, even ones that depend on its noise:
**coupled** drafts are the K largest of log p + g with the Gumbel noise g that samples the target as
argmax(log q + g). If p is close to q, they hit more often than any K independent draws.
"""

import torch

from csd.research.verify.scheme import (
    DraftDecision,
    Noise,
    Scheme,
    SchemePlan,
    inverse_cdf,
    normalised,
)


class Match(Scheme):
    name = "match"

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> SchemePlan:
        chance = q.gather(1, x)
        # a token counts at its first draft; after that it cannot be the output any more
        previous = torch.ones(x.shape[1], x.shape[1], device=x.device).tril(-1).bool()
        again = ((x[:, :, None] == x[:, None, :]) & previous).any(-1)
        chance = torch.where(again, 0, chance)
        left = 1 - chance.cumsum(-1) + chance
        accept = torch.where(chance > 0, chance / left.clamp(min=1e-300), 0).clamp(max=1)
        drafted = torch.zeros_like(q, dtype=torch.bool).scatter_(1, x, True)
        return SchemePlan(None, accept, normalised(torch.where(drafted, 0, q), q))

    def _decide(
        self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor, noise: Noise
    ) -> DraftDecision:
        token = inverse_cdf(q, noise.residual)
        hit = x == token[:, None]
        return DraftDecision(token, torch.where(hit.any(-1), hit.int().argmax(-1), -1))

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return (q * (1 - (1 - p).prod(1))).sum(-1)


def fixed_drafts(proposal: torch.Tensor, k: int) -> torch.Tensor:
    """[B, k] int64: the likeliest tokens of proposal [B, V], ties to smaller ids; -1 pads."""
    return _largest(proposal.double(), k, proposal)


def coupled_drafts(proposal: torch.Tensor, gumbel: torch.Tensor, k: int) -> torch.Tensor:
    """[B, k] int64: the largest of log proposal + gumbel, both [B, V]; -1 pads."""
    return _largest(proposal.double().log() + gumbel.double(), k, proposal)


def _largest(score: torch.Tensor, k: int, proposal: torch.Tensor) -> torch.Tensor:
    order = score.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    drafts = torch.where(proposal.gather(1, order) > 0, order, -1)
    return torch.nn.functional.pad(drafts, (0, k - drafts.shape[1]), value=-1)
