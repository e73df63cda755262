"""K-SEQ: try the drafts in order, each with probability min(1, q / (rho p)).

    beta(rho) = sum over y of min(q(y) / rho, p(y)),   acceptance = 1 - (1 - beta)^K
    residual  = norm((q - min(q / rho, p) acceptance / beta)^+)

The residual is not negative if rho beta >= acceptance; the best rho is the smallest one in [1, K]
that satisfies this. It is computed by bisection and rounded up, so the output is exact for this
rho. All drafts have the same proposal.

Sun et al., "SpecTr: fast speculative decoding via optimal transport", 2310.15141.
"""

import torch

from csd.verify.scheme import Plan, Scheme, normalised, ratio

HALVINGS = 50


class KSeq(Scheme):
    name = "kseq"
    same_proposals = True

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> Plan:
        K, p = x.shape[1], p[:, 0]
        rho = solve_rho(q, p, K)[:, None]
        share = torch.minimum(q / rho, p)
        # acceptance / beta, which tends to K where no draft can be accepted
        reject = 1 - share.sum(-1, keepdim=True)
        scale = sum(reject**k for k in range(K))
        accept = ratio(q.gather(1, x) / rho, p.gather(1, x))
        return Plan(None, accept, normalised((q - share * scale).clamp(min=0), q))

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
