"""The verification that `csd/kernels/verify/` describes, in plain PyTorch."""

import torch

from csd.kernels.verify.passes import Draws, Passes
from csd.kernels.verify.reference_draws import draw_ref
from csd.kernels.verify.reference_paths import descend_ref
from csd.kernels.verify.reference_rows import heads_ref, log_sum_ref, sample_rows
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# numbers in a block of rows: passes over it stay in a CPU's cache, and its memory is reused
BLOCK = 1 << 19


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
    most = max(rows.shape[0], 1)
    if passes is REFERENCE and logits.device.type == "cpu":
        most = max(BLOCK // logits.shape[1], 2)
    found = (sample_rows(logits[part], part, pool, slots, passes) for part in rows.split(most))
    return Draws(*(torch.cat(x) for x in zip(*found, strict=True)))


def verdict_of(
    sampled: Draws, logits: torch.Tensor, pool: Pool, slots: Slots, passes: Passes
) -> Verdict:
    """Returns the verdict of rows that have been sampled; others must have token -1."""
    live = pool.slot >= 0
    greedy = slots.temperature[pool.slot.clamp(min=0).long()] == 0
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
    """[M]: log-probabilities of committed samples at temperature 1; [S] bool: bad slots."""
    rows = accept_row[accept_row >= 0].long()
    raw = torch.zeros_like(log_total)
    chosen = logits[rows]
    of_sample = chosen.gather(1, sample[rows].long()[:, None])[:, 0].to(raw.dtype)
    broken = ~log_total[rows].isfinite()
    raw[rows] = torch.where(broken, torch.nan, of_sample - passes.log_sum(chosen))
    bad = torch.zeros(slots.count, dtype=torch.int32, device=logits.device)
    bad.index_add_(0, pool.slot[rows].long(), broken.int())
    return raw, bad > 0
