"""Recursive rejection: try the drafts in order, each against the residual of the previous ones.

    q_1 = q,   accept x_k with probability min(1, q_k(x_k) / p_k(x_k)),
    q_{k+1} = norm((q_k - p_k)^+),   after the last draft, draw from q_{K+1}
    acceptance = 1 - prod over k of (1 - sum over y of min(q_k(y), p_k(y)))    with replacement

Without replacement a draft is never drawn twice: p_k is the proposal without x_1 .. x_{k-1},
renormalised; once no mass is left, the draws are null. So q_k depends on the drafts.

Miao et al., "SpecInfer", 2305.09781; without replacement: Jeon et al., "Recursive speculative
decoding", 2402.14160.
"""

from dataclasses import dataclass

import torch

from csd.verify.scheme import Plan, Scheme, normalised, ratio


@dataclass(frozen=True)
class Recursive(Scheme):
    replacement: bool = True

    @property
    def name(self) -> str:
        return "recursive" if self.replacement else "recursive without replacement"

    @property
    def same_proposals(self) -> bool:
        return not self.replacement

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> Plan:
        if not self.replacement:
            p = without_replacement(x, p[:, 0])
        accept = torch.empty(x.shape, dtype=q.dtype, device=q.device)
        for k in range(x.shape[1]):
            at = x[:, k : k + 1]
            accept[:, k : k + 1] = ratio(q.gather(1, at), p[:, k].gather(1, at))
            q = normalised((q - p[:, k]).clamp(min=0), q)
        return Plan(None, accept, q)

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
