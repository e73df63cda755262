"""Verdict of a step's verification."""

from dataclasses import dataclass

import torch

from csd.state.pool import MAX_DEPTH

# state of a slot after the step
RUNNING, STOP, LENGTH = 0, 1, 2

TOP = 8
# most rows of an accepted path
ACCEPT = MAX_DEPTH + 1


@dataclass(slots=True)
class Verdict:
    """M rows of the pool, S slots, at most A = MAX_DEPTH + 1 rows on an accepted path."""

    sample: torch.Tensor  # [M] int32, token drawn at the row from the target, -1 in padding
    logprob: torch.Tensor  # [M] of `sample`, processed distribution; the raw one if greedy
    # [M] of `sample`, the model's own; 0 off the path, NaN at a bad row of it
    raw_logprob: torch.Tensor
    top_token: torch.Tensor  # [M, 8] int32, likeliest tokens first, -1 where there are fewer
    top_prob: torch.Tensor  # [M, 8] float32, of the processed distribution, 0 in padding
    accept_row: torch.Tensor  # [S, A] int32, rows kept of the accepted path, root first, then -1
    accept_count: torch.Tensor  # [S] int32, rows kept after stop rules = tokens committed
    finish: torch.Tensor  # [S] int32, RUNNING, STOP or LENGTH
    # [S] bool, a row of the slot's path is bad: a logit is NaN or +inf, or all are -inf
    bad: torch.Tensor


def empty_verdict(
    rows: int, slots: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Verdict:
    """Allocates a verdict; nothing is written."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Verdict(
        sample=empty(rows),
        logprob=empty(rows, dtype=dtype),
        raw_logprob=empty(rows, dtype=dtype),
        top_token=empty(rows, TOP),
        top_prob=empty(rows, TOP, dtype=torch.float32),
        accept_row=empty(slots, ACCEPT),
        accept_count=empty(slots),
        finish=empty(slots),
        bad=empty(slots, dtype=torch.bool),
    )
