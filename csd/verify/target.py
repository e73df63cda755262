"""Processed target distribution over the whole vocabulary, at selected rows of a pool.

In transformers' order: repetition penalty over the prompt, the sample and the row's path; banned
end tokens; temperature; top-k; top-p; min-p. `csd/kernels/verify/` samples from the same
distribution without materialising it.
"""

import torch

from csd.kernels.verify.passes import HEAD_WIDTH
from csd.state.pool import Pool
from csd.state.slots import Slots


def processed(logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots) -> torch.Tensor:
    """Probabilities [n, V] at `rows` [n] of the pool, at temperatures above 0.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    s = pool.slot[rows].long()
    x = logits[rows].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for i, row in enumerate(rows.tolist()):
        if slots.penalty[s[i]] != 1:
            _penalise(x[i], row, pool, slots)
        if slots.generated[s[i]] + pool.depth[row] < slots.min_new[s[i]]:
            ban = slots.ban_ids[s[i]]
            x[i, ban[ban >= 0].long()] = -torch.inf
    z = x / slots.temperature[s].to(x.dtype)[:, None]
    z -= z.amax(-1, keepdim=True)
    top_k, top_p, min_p = (v[s].tolist() for v in (slots.top_k, slots.top_p, slots.min_p))
    for i in range(rows.shape[0]):
        if 0 < top_k[i] < z.shape[1]:
            z[i] = torch.where(z[i] >= z[i].topk(top_k[i]).values[-1], z[i], -torch.inf)
        if top_p[i] < 1:
            _cut_tail(z[i], 1 - top_p[i])
        if min_p[i] > 0:
            z[i] = torch.where(z[i].exp() >= min_p[i], z[i], -torch.inf)
    return z.softmax(-1)


def _penalise(x: torch.Tensor, row: int, pool: Pool, slots: Slots) -> None:
    """Penalise x [V] in place: every token of prompt, sample and path counts once."""
    s = int(pool.slot[row])
    bit = torch.arange(32, device=x.device)
    seen = ((slots.seen[s][:, None] >> bit) & 1).flatten()[: x.shape[0]].bool()
    while row >= 0:
        seen[pool.token[row].long()] = True
        row = int(pool.parent[row])
    penalty = slots.penalty[s].to(x.dtype)
    x.copy_(torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x))


def _cut_tail(z: torch.Tensor, tail: float) -> None:
    """Set the least likely tokens of z [V], of mass `tail` at most, to -inf; z has maximum 0.

    A token is dropped if the mass up to and including it, in ascending order, is at most `tail`;
    equal values ascend in token order; the likeliest token stays.
    """
    mass = z.exp()
    total = mass.sum()
    head = (z >= -HEAD_WIDTH).nonzero()[:, 0]
    below = torch.where(z >= -HEAD_WIDTH, 0, mass).sum()
    if below / total > tail:
        head, below = torch.arange(z.shape[0], device=z.device), torch.zeros_like(total)
    ascending, order = z[head].sort(stable=True)
    gone = (below + ascending.exp().cumsum(0)) / total <= tail
    gone[-1] = False
    nucleus = head[order[~gone]]
    values = z[nucleus]
    z.fill_(-torch.inf)
    z[nucleus] = values
