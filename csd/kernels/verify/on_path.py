"""CPU verification that samples the likely rows, and then the rows that an accepted path reaches.

On a CPU a row costs the time to read it, and most drafted rows are off the accepted paths, so that
nothing of them is committed. Rows that are likely to be accepted are sampled at once. Then, as long
as a path reaches a row that is not sampled, such rows are sampled: a batch of rows costs little
more than one.
"""

import torch

from csd.kernels.verify.passes import Draws, Passes
from csd.kernels.verify.reference import REFERENCE, sample_blocks, verdict_of, verify_ref
from csd.state.pool import COST_ONE, Pool, rooted
from csd.state.slots import Slots
from csd.state.verdict import TOP, Verdict

# largest cost of rows that are sampled at once: they are accepted about as often as not
LIKELY = 3 * COST_ONE // 2


def verify_on_path(
    logits: torch.Tensor, pool: Pool, slots: Slots, passes: Passes = REFERENCE
) -> Verdict:
    """Verdict of `verify_ref`, except that rows off the accepted paths may not be sampled.

    Those have token -1, no likeliest tokens and log-probability 0.
    """
    M, device = pool.rows, logits.device
    live = pool.slot >= 0
    rows = (live & (pool.cost <= LIKELY)).nonzero()[:, 0]
    if rows.shape[0] == M:
        return verify_ref(logits, pool, slots, passes)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    parent = pool.parent.clamp(min=0).long()
    drawn = Draws(
        token=torch.full((M,), -1, device=device),
        logprob=torch.zeros(M, dtype=dtype, device=device),
        log_total=torch.zeros(M, dtype=dtype, device=device),
        top_token=torch.full((M, TOP), -1, device=device),
        top_prob=torch.zeros(M, TOP, device=device),
    )
    left = live.clone()  # rows that have not been sampled
    while rows.shape[0]:
        found = sample_blocks(logits, rows, pool, slots, passes)
        for whole, part in zip(drawn, found, strict=True):
            whole.index_copy_(0, rows, part)
        left[rows] = False
        accepted = rooted(pool, (pool.parent < 0) | (drawn.token[parent] == pool.token))
        rows = (left & accepted).nonzero()[:, 0]
    return verdict_of(drawn, logits, pool, slots, passes)
