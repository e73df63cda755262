"""Verdict of a step's verification."""

from dataclasses import dataclass

import torch

from csd.state.pool import MAX_DEPTH
from csd.state.record import allocate, tensor

# state of a slot after the step
RUNNING, STOP, LENGTH = 0, 1, 2

TOP = 8
# most rows of an accepted path
ACCEPT = MAX_DEPTH + 1


@dataclass(slots=True)
class Verdict:
    """M rows of the pool, S slots, at most A = MAX_DEPTH + 1 rows on an accepted path."""

    sample: torch.Tensor = tensor("M")  # token drawn at the row from the target, -1 in padding
    # log-probability of `sample` after filters; without them if greedy
    logprob: torch.Tensor = tensor("M", None)
    # the model's own of `sample`; 0 off the path, NaN at a bad row of it
    raw_logprob: torch.Tensor = tensor("M", None)
    # likeliest tokens first, -1 where there are fewer
    top_token: torch.Tensor = tensor(f"M {TOP}")
    # their probabilities after filters, 0 in padding
    top_prob: torch.Tensor = tensor(f"M {TOP}", torch.float32)
    # rows kept of the accepted path, root first, then -1
    accept_row: torch.Tensor = tensor("S A")
    accept_count: torch.Tensor = tensor("S")  # rows kept after stop rules = tokens committed
    finish: torch.Tensor = tensor("S")  # RUNNING, STOP or LENGTH
    # a row of the slot's path is bad: a logit is NaN or +inf, or all are -inf
    bad: torch.Tensor = tensor("S", torch.bool)


def empty_verdict(
    rows: int, slots: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Verdict:
    """Allocates a verdict; nothing is written. dtype: of log-probabilities."""
    return Verdict(**allocate(Verdict, {"M": rows, "S": slots, "A": ACCEPT}, device, dtype))
