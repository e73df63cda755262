"""The verification that `csd/kernels/verify/` describes, in plain PyTorch.

`verify_ref` samples every row (`reference_rows.py`) and follows the accepted path of every slot.

`verify_on_path`, for a CPU, samples the likely rows, and then those that an accepted path reaches.
On a CPU a row costs the time to read it, and most drafted rows are off the accepted paths, so that
nothing of them is committed. Rows that are likely to be accepted are sampled at once. Then, as long
as a path reaches a row that is not sampled, such rows are sampled: a batch of rows costs little
more than one.
"""

import torch

from csd.kernels.verify.passes import Draws, Passes, Paths
from csd.kernels.verify.reference_rows import draw_ref, heads_ref, log_sum_ref, sample_rows
from csd.state.filters import is_greedy
from csd.state.pool import COST_ONE, MAX_DEPTH, Pool, rooted
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP, TOP, Verdict

# numbers in a block of rows: passes over it stay in a CPU's cache, and its memory is reused
BLOCK = 1 << 19
# largest cost of rows that are sampled at once: they are accepted about as often as not
LIKELY = 3 * COST_ONE // 2


def descend_ref(sample: torch.Tensor, pool: Pool, slots: Slots) -> Paths:
    """Returns the rows whose parents drew them, from the root on, cut by the slot's stop rules.

    sample: [M], -1 where no token was drawn.
    """
    device = sample.device
    n_slots = slots.count
    s = pool.slot.clamp(min=0).long()
    parent = pool.parent.clamp(min=0).long()
    accepted = rooted(pool, (pool.parent < 0) | (sample[parent] == pool.token))

    width = MAX_DEPTH + 1
    # rows that are not accepted write to an extra element after the table
    index = torch.where(accepted, s * width + pool.depth, n_slots * width)
    table = torch.full((n_slots * width + 1,), -1, dtype=torch.int32, device=device)
    rows = torch.arange(pool.rows, dtype=torch.int32, device=device)
    accept_row = table.scatter_(0, index, rows)[:-1].view(n_slots, width)

    path = torch.where(accept_row >= 0, sample[accept_row.clamp(min=0).long()], -1)
    ended = ((path[:, :, None] == slots.stop_ids[:, None, :]) & (path[:, :, None] >= 0)).any(-1)
    ever = ended.any(-1)
    until_end = torch.where(ever, ended.int().argmax(-1) + 1, width)
    count = (accept_row >= 0).sum(-1)
    left = slots.max_new - slots.generated
    accepted_count = torch.minimum(torch.minimum(count, until_end), left).clamp(min=0)
    finish = torch.where(accepted_count == left, LENGTH, RUNNING)
    finish = torch.where(ever & (until_end <= accepted_count), STOP, finish)
    in_flight = pool.slot_nodes > 0
    accepted_count = torch.where(in_flight, accepted_count, 0).int()
    finish = torch.where(in_flight, finish, RUNNING).int()
    places = torch.arange(width, device=device)
    return torch.where(places < accepted_count[:, None], accept_row, -1), accepted_count, finish


REFERENCE = Passes(heads_ref, log_sum_ref, draw_ref, descend_ref)


def verify_ref(
    logits: torch.Tensor, pool: Pool, slots: Slots, passes: Passes = REFERENCE
) -> Verdict:
    """Samples at every row and follows the accepted paths; returns the verdict.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    return verdict_of(sample_blocks(logits, rows, pool, slots, passes), logits, pool, slots, passes)


def sample_blocks(
    logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots, passes: Passes
) -> Draws:
    """Draws of the pool's `rows` [R], in their order."""
    rows_per_block = max(rows.shape[0], 1)
    if passes is REFERENCE and logits.device.type == "cpu":
        rows_per_block = max(BLOCK // logits.shape[1], 2)
    blocks = (
        sample_rows(logits[part], part, pool, slots, passes) for part in rows.split(rows_per_block)
    )
    return Draws(*(torch.cat(x) for x in zip(*blocks, strict=True)))


def verdict_of(
    sampled: Draws, logits: torch.Tensor, pool: Pool, slots: Slots, passes: Passes
) -> Verdict:
    """Returns the verdict of rows that have been sampled; others must have token -1."""
    live = pool.slot >= 0
    greedy = is_greedy(slots, pool.slot.clamp(min=0).long())
    sample = torch.where(live, sampled.token, -1)
    accept_row, accept_count, finish = passes.descend(sample, pool, slots)
    raw_logprob, bad = _raw_logprob(
        logits, sample, accept_row, sampled.log_total, pool, slots, passes
    )
    return Verdict(
        sample=sample.int(),
        logprob=torch.where(live, torch.where(greedy, raw_logprob, sampled.logprob), 0),
        raw_logprob=raw_logprob,
        top_token=sampled.top_token.int(),
        top_prob=sampled.top_prob,
        accept_row=accept_row,
        accept_count=accept_count,
        finish=finish,
        bad=bad,
    )


def _raw_logprob(
    logits: torch.Tensor,
    sample: torch.Tensor,
    accept_row: torch.Tensor,
    log_total: torch.Tensor,
    pool: Pool,
    slots: Slots,
    passes: Passes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M]: raw log-probabilities of committed samples; [S] bool: bad slots."""
    rows = accept_row[accept_row >= 0].long()
    raw = torch.zeros_like(log_total)
    chosen = logits[rows]
    of_sample = chosen.gather(1, sample[rows].long()[:, None])[:, 0].to(raw.dtype)
    broken = ~log_total[rows].isfinite()
    raw[rows] = torch.where(broken, torch.nan, of_sample - passes.log_sum(chosen))
    bad = torch.zeros(slots.count, dtype=torch.int32, device=logits.device)
    bad.index_add_(0, pool.slot[rows].long(), broken.int())
    return raw, bad > 0


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
        samples = sample_blocks(logits, rows, pool, slots, passes)
        for whole, part in zip(drawn, samples, strict=True):
            whole.index_copy_(0, rows, part)
        left[rows] = False
        accepted = rooted(pool, (pool.parent < 0) | (drawn.token[parent] == pool.token))
        rows = (left & accepted).nonzero()[:, 0]
    return verdict_of(drawn, logits, pool, slots, passes)
