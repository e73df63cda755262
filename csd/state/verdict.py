"""What verification decided in one step."""

from dataclasses import dataclass

import torch

# how a slot stands after the step
RUNNING, STOP, LENGTH = 0, 1, 2

TOP = 8


@dataclass(slots=True)
class Verdict:
    """M rows of the pool, S slots, A = MAX_DEPTH + 1 rows at most on an accepted path."""

    sample: torch.Tensor  # [M] int32, token drawn at the row from the target, -1 in padding
    logprob: torch.Tensor  # [M] of `sample`, processed distribution; the raw one if greedy
    raw_logprob: torch.Tensor  # [M] of `sample`, the model's own at temperature 1; 0 off the path
    top_token: torch.Tensor  # [M, 8] int32, likeliest tokens first, -1 where there are fewer
    top_prob: torch.Tensor  # [M, 8] float32, of the processed distribution, 0 in padding
    accept_row: torch.Tensor  # [S, A] int32, rows kept of the accepted path, root first, then -1
    accept_count: torch.Tensor  # [S] int32, rows kept after stop rules = tokens committed
    finish: torch.Tensor  # [S] int32, RUNNING, STOP or LENGTH
    bad: torch.Tensor  # [S] bool, a logit of the slot is NaN or +inf, or all are -inf
