"""What `csd/kernels/verify/` describes, in plain PyTorch."""

from typing import NamedTuple

import torch

from csd.kernels.verify.reference_rows import REFERENCE, Passes, sample_rows
from csd.state.pool import MAX_DEPTH, Pool, joined
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, STOP, Verdict

# numbers of a block of rows: its passes stay in a CPU's cache, and its memory is used again
BLOCK = 1 << 19


class Sampled(NamedTuple):
    """What M rows of a pool drew, each alone."""

    token: torch.Tensor  # [M] int64
    logprob: torch.Tensor  # [M] of the token
    log_total: torch.Tensor  # [M] log of the row's mass behind the filters
    top_token: torch.Tensor  # [M, 8] int64
    top_prob: torch.Tensor  # [M, 8] float32


def verify_ref(
    logits: torch.Tensor, pool: Pool, slots: Slots, passes: Passes = REFERENCE
) -> Verdict:
    """Sample at every row and follow the accepted paths.

    logits: [M, V]; 16-bit logits are processed in float32, float64 stays float64.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    return verdict_of(sample_blocks(logits, rows, pool, slots, passes), logits, pool, slots, passes)


def sample_blocks(
    logits: torch.Tensor, rows: torch.Tensor, pool: Pool, slots: Slots, passes: Passes
) -> Sampled:
    """Of the pool's `rows` [R], in their order."""
    most = max(rows.shape[0], 1)
    if passes is REFERENCE and logits.device.type == "cpu":
        most = max(BLOCK // logits.shape[1], 2)
    found = (sample_rows(logits[part], part, pool, slots, passes) for part in rows.split(most))
    return Sampled(*(torch.cat(x) for x in zip(*found, strict=True)))


def verdict_of(
    sampled: Sampled, logits: torch.Tensor, pool: Pool, slots: Slots, passes: Passes
) -> Verdict:
    """The accepted paths, of rows that have been sampled; others have token -1."""
    live = pool.slot >= 0
    greedy = slots.temperature[pool.slot.clamp(min=0).long()] == 0
    sample = torch.where(live, sampled.token, -1)
    accept_row, accept_count, finish = descend(sample, pool, slots)
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


def descend(
    sample: torch.Tensor, pool: Pool, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted path of every slot, cut by its stop rules."""
    device = sample.device
    n_slots = slots.count
    s = pool.slot.clamp(min=0).long()
    parent = pool.parent.clamp(min=0).long()
    accepted = joined(pool, (pool.parent < 0) | (sample[parent] == pool.token))

    width = MAX_DEPTH + 1
    # rows that are not accepted write to a place of their own behind the table
    place = torch.where(accepted, s * width + pool.depth, n_slots * width)
    table = torch.full((n_slots * width + 1,), -1, dtype=torch.int32, device=device)
    rows = torch.arange(pool.rows, dtype=torch.int32, device=device)
    accept_row = table.scatter_(0, place, rows)[:-1].view(n_slots, width)

    path = torch.where(accept_row >= 0, sample[accept_row.clamp(min=0).long()], -1)
    ended = ((path[:, :, None] == slots.stop_ids[:, None, :]) & (path[:, :, None] >= 0)).any(-1)
    ever = ended.any(-1)
    until_end = torch.where(ever, ended.int().argmax(-1) + 1, width)
    count = (accept_row >= 0).sum(-1)
    left = slots.max_new - slots.generated
    kept = torch.minimum(torch.minimum(count, until_end), left).clamp(min=0)
    finish = torch.where(kept == left, LENGTH, RUNNING)
    finish = torch.where(ever & (until_end <= kept), STOP, finish)
    in_flight = pool.slot_nodes > 0
    kept = torch.where(in_flight, kept, 0).int()
    finish = torch.where(in_flight, finish, RUNNING).int()
    places = torch.arange(width, device=device)
    return torch.where(places < kept[:, None], accept_row, -1), kept, finish


def _raw_logprob(
    logits: torch.Tensor,
    sample: torch.Tensor,
    accept_row: torch.Tensor,
    log_total: torch.Tensor,
    pool: Pool,
    slots: Slots,
    passes: Passes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of the committed samples at temperature 1, and which slots went bad."""
    rows = accept_row[accept_row >= 0].long()
    raw = torch.zeros_like(log_total)
    chosen = logits[rows]
    of_sample = chosen.gather(1, sample[rows].long()[:, None])[:, 0].to(raw.dtype)
    raw[rows] = of_sample - passes.log_sum(chosen)
    live = pool.slot >= 0
    broken = live & ~log_total.isfinite()
    bad = torch.zeros(slots.count, dtype=torch.int32, device=logits.device)
    bad.index_add_(0, pool.slot.clamp(min=0).long(), broken.int())
    return raw, bad > 0
