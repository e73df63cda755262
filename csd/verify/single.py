"""Single-draft speculative sampling: the first draft alone, the others unused.

    accept x_1 with probability min(1, q(x_1) / p_1(x_1)),  else draw from norm((q - p_1)^+)
    acceptance = sum over y of min(q(y), p_1(y))

Leviathan et al., "Fast inference from transformers via speculative decoding", 2211.17192.
"""

import torch

from csd.verify.scheme import Plan, Scheme, normalised, ratio


class Single(Scheme):
    name = "single"

    def _plan(self, x: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> Plan:
        first = x[:, :1]
        accept = torch.zeros(x.shape, dtype=q.dtype, device=q.device)
        accept[:, :1] = ratio(q.gather(1, first), p[:, 0].gather(1, first))
        return Plan(None, accept, normalised((q - p[:, 0]).clamp(min=0), q))

    def _acceptance(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.minimum(q, p[:, 0]).sum(-1)
