"""Rejection of drafts: recursive, K-SEQ with one scale, and of the first draft alone.

**Recursive**: try the drafts in order, each against the residual of the previous ones.

    q_1 = q,   accept x_k with probability min(1, q_k(x_k) / p_k(x_k)),
    q_{k+1} = norm((q_k - p_k)^+),   after the last draft, draw from q_{K+1}
    acceptance = 1 - prod over k of (1 - sum over y of min(q_k(y), p_k(y)))    with replacement

Without replacement a draft is never drawn twice: p_k is the proposal without x_1 .. x_{k-1},
renormalised; once no mass is left, the draws are null. So q_k depends on the drafts.

Miao et al., "SpecInfer", 2305.09781; without replacement: Jeon et al., "Recursive speculative
decoding", 2402.14160.

**K-SEQ**: try the drafts in order, each with probability min(1, q / (rho p)).

    beta(rho) = sum over y of min(q(y) / rho, p(y)),   acceptance = 1 - (1 - beta)^K
    residual  = norm((q - min(q / rho, p) acceptance / beta)^+)

The residual is not negative if rho beta >= acceptance; the best rho is the smallest one in [1, K]
that satisfies this. It is computed by bisection and rounded up, so the output is exact for this
rho. All drafts have the same proposal.

Sun et al., "SpecTr: fast speculative decoding via optimal transport", 2310.15141.

**Single**: speculative sampling with the first draft alone, the others unused.

    accept x_1 with probability min(1, q(x_1) / p_1(x_1)),  else draw from norm((q - p_1)^+)
    acceptance = sum over y of min(q(y), p_1(y))

Leviathan et al., "Fast inference from transformers via speculative decoding", 2211.17192.
"""

from dataclasses import dataclass

import torch

from csd.research.verify.scheme import Scheme, SchemePlan, normalised, ratio


@dataclass(frozen=True)
class Recursive(Scheme):
    replacement: bool = True

    @property
    def name(self) -> str:
        return "recursive" if self.replacement else "recursive without replacement"

    @property
    def same_proposals(self) -> bool:
        return not self.replacement

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> SchemePlan:
        if not self.replacement:
            p = without_replacement(x, p[:, 0])
        accept = torch.empty(x.shape, dtype=q.dtype, device=q.device)
        for k in range(x.shape[1]):
            column = x[:, k : k + 1]
            accept[:, k : k + 1] = ratio(q.gather(1, column), p[:, k].gather(1, column))
            q = normalised((q - p[:, k]).clamp(min=0), q)
        return SchemePlan(None, accept, q)

    def draft_probs(self, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if not self.replacement:
            p = without_replacement(x, p[:, 0])
        return super().draft_probs(x, p)

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if not self.replacement:
            return super()._acceptance(q, p)
        reject = torch.ones(q.shape[0], dtype=q.dtype, device=q.device)
        for k in range(p.shape[1]):
            reject = reject * (1 - torch.minimum(q, p[:, k]).sum(-1)).clamp(min=0)
            q = normalised((q - p[:, k]).clamp(min=0), q)
        return 1 - reject


def without_replacement(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[B, K, A]: distribution of each draft after those before it; x: [B, K], p: [B, A]."""
    null = torch.zeros_like(p)
    null[:, -1] = 1
    distributions = []
    for k in range(x.shape[1]):
        distributions.append(normalised(p, null))
        p = p.scatter(1, x[:, k : k + 1], 0)
    return torch.stack(distributions, 1)


HALVINGS = 50


class KSeq(Scheme):
    name = "kseq"
    same_proposals = True

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> SchemePlan:
        K, p = x.shape[1], p[:, 0]
        rho = solve_rho(q, p, K)[:, None]
        share = torch.minimum(q / rho, p)
        # acceptance / beta, which tends to K where no draft can be accepted
        reject = 1 - share.sum(-1, keepdim=True)
        scale = sum(reject**k for k in range(K))
        accept = ratio(q.gather(1, x) / rho, p.gather(1, x))
        return SchemePlan(None, accept, normalised((q - share * scale).clamp(min=0), q))

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        K, p = p.shape[1], p[:, 0]
        beta = torch.minimum(q / solve_rho(q, p, K)[:, None], p).sum(-1)
        return 1 - (1 - beta).clamp(min=0) ** K


def solve_rho(q: torch.Tensor, p: torch.Tensor, K: int) -> torch.Tensor:
    """[B]: the smallest rho in [1, K] with rho beta(rho) >= 1 - (1 - beta(rho))^K, rounded up."""
    low = torch.ones(q.shape[0], dtype=q.dtype, device=q.device)
    high = torch.full_like(low, K)
    if K == 1:
        return low
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        beta = torch.minimum(q / rho[:, None], p).sum(-1)
        enough = rho * beta >= 1 - (1 - beta) ** K
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    return high


class Single(Scheme):
    name = "single"

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> SchemePlan:
        first = x[:, :1]
        accept = torch.zeros(x.shape, dtype=q.dtype, device=q.device)
        accept[:, :1] = ratio(q.gather(1, first), p[:, 0].gather(1, first))
        return SchemePlan(None, accept, normalised((q - p[:, 0]).clamp(min=0), q))

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.minimum(q, p[:, 0]).sum(-1)
