"""Processed target distribution over the whole vocabulary, at selected rows of a pool.

`csd/kernels/verify/` defines it, and samples from it without materialising it.
"""

import torch

from csd.kernels.verify.reference_rows import row_scores
from csd.state.pool import Pool
from csd.state.slots import Slots


def processed(logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots) -> torch.Tensor:
    """Probabilities [n, V] at `rows` [n] of the pool; greedy rows are not filtered.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    z, heads, rest = row_scores(logits[rows], rows, pool, slots)
    # the last column takes the padding of heads
    allowed = torch.cat([rest > 0, torch.zeros_like(rest[:, :1], dtype=torch.bool)], dim=1)
    allowed = allowed.scatter_(1, heads.token, heads.score > -torch.inf)[:, :-1]
    return torch.where(allowed, z, -torch.inf).softmax(-1)
