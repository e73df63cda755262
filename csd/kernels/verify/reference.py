"""The verification that `csd/kernels/verify/` describes, in plain PyTorch.

`verify_ref` samples every row (`reference_rows.py`) and follows the accepted path of every slot.
"""

import torch

from csd.kernels.verify.reference_rows import Draws, own_chance, sample_rows
from csd.state.filters import is_greedy
from csd.state.pool import MAX_DEPTH, Pool, model_row, rooted
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP, Verdict

# numbers in a block of rows: passes over it stay in a CPU's cache, and its memory is reused
BLOCK = 1 << 19

# accept_row [S, A], accept_count [S], finish [S]; see `csd.state.verdict.Verdict`
Paths = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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


def verify_ref(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Samples at every row and follows the accepted paths; returns the verdict.

    logits: [M, V], or [R, V] of the rows of `pool.texts`; 16-bit logits are processed in float32,
    float64 stays float64.
    """
    sampled = _sample(logits, pool, slots)
    live = pool.slot >= 0
    greedy = is_greedy(slots, pool.slot.clamp(min=0).long())
    sample = torch.where(live, sampled.token, -1)
    accept_row, accept_count, finish = descend_ref(sample, pool, slots)
    rows = accept_row[accept_row >= 0].long()
    broken = ~sampled.log_total[rows].isfinite()
    raw = own_chance(logits[model_row(pool, rows)], sample[rows])
    raw_logprob = torch.zeros_like(sampled.log_total)
    raw_logprob[rows] = torch.where(broken, torch.nan, raw)
    bad = torch.zeros_like(accept_count).index_add_(0, pool.slot[rows].long(), broken.int())
    return Verdict(
        sample=sample.int(),
        logprob=torch.where(live, torch.where(greedy, raw_logprob, sampled.logprob), 0),
        raw_logprob=raw_logprob,
        top_token=sampled.top_token.int(),
        top_prob=sampled.top_prob,
        accept_row=accept_row,
        accept_count=accept_count,
        finish=finish,
        bad=bad > 0,
    )


def _sample(logits: torch.Tensor, pool: Pool, slots: Slots) -> Draws:
    """Draws of all rows."""
    M, V = pool.rows, logits.shape[1]
    rows_per_block = max(BLOCK // V, 2) if logits.device.type == "cpu" else max(M, 1)
    blocks = (
        sample_rows(logits[model_row(pool, part)], part, pool, slots)
        for part in torch.arange(M, device=logits.device).split(rows_per_block)
    )
    return Draws(*(torch.cat(x) for x in zip(*blocks, strict=True)))
