"""Processed target distribution over the whole vocabulary, at selected rows of a pool.

`csd/kernels/verify/` defines it, and samples from it without materialising it.
"""

import torch

from csd.kernels.verify.reference_rows import row_logits, split_rows
from csd.state.pool import Pool
from csd.state.slots import Slots


def processed(logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots) -> torch.Tensor:
    """Probabilities [n, V] at `rows` [n] of the pool, at temperatures above 0.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    s = pool.slot[rows].long()
    x = row_logits(logits[rows], rows, pool, slots)
    temperature = slots.temperature[s].to(torch.promote_types(x.dtype, torch.float32))
    z, heads, rest = split_rows(x, temperature, slots, s, torch.zeros_like(s, dtype=torch.bool))
    # the last column takes the padding of heads
    kept = torch.cat([rest > 0, torch.zeros_like(rest[:, :1], dtype=torch.bool)], dim=1)
    kept = kept.scatter_(1, heads.token, heads.score > -torch.inf)[:, :-1]
    return torch.where(kept, z, -torch.inf).softmax(-1)
