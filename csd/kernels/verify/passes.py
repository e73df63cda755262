"""Functions of which verification on a CPU consists: references, or loops in their place.

The constants of a row's head are those of the references, the loops and the Triton kernels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from csd.state.pool import Pool
from csd.state.slots import Slots

# exp(-11.1) = 1.5e-5: everything below is drawn as one atom
HEAD_WIDTH = 11.1
# the largest top-k whose tokens are all of the head
MAX_HEAD = 1024


class Heads(NamedTuple):
    """Heads of rows of scores z, 0 at a row's maximum: tokens with large z, and the others' mass.

    W is the longest head.
    """

    token: torch.Tensor  # [R, W] in ascending order, V in padding
    score: torch.Tensor  # [R, W] their z, -inf in padding
    rest_mass: torch.Tensor  # [R] sum of exp(z) of the others that the filters keep


class Rows(NamedTuple):
    """R rows of a pool."""

    slot: torch.Tensor  # [R] int64, 0 in padding
    position: torch.Tensor  # [R] generated position of the token that is drawn
    greedy: torch.Tensor  # [R] bool
    live: torch.Tensor  # [R] bool, false in padding


class Draws(NamedTuple):
    """Draws of R rows, each independent of the others."""

    token: torch.Tensor  # [R] int64
    logprob: torch.Tensor  # [R] of the token
    log_total: torch.Tensor  # [R] log of the row's mass after the filters
    top_token: torch.Tensor  # [R, 8] int64, the likeliest tokens
    top_prob: torch.Tensor  # [R, 8] float32


# accept_row [S, A], accept_count [S], finish [S]; see `csd.state.verdict.Verdict`
Paths = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Passes(NamedTuple):
    """Functions of which verification consists."""

    # x [R, V], temperature [R], slots, slot [R], greedy [R]
    heads: Callable[[torch.Tensor, torch.Tensor, Slots, torch.Tensor, torch.Tensor], Heads]
    # x [R, V] to log sum exp(x) [R], at least float32
    log_sum: Callable[[torch.Tensor], torch.Tensor]
    # heads, rows, slots, V: the rest of a row is token V
    draw: Callable[[Heads, Rows, Slots, int], Draws]
    # sample [M], pool, slots
    descend: Callable[[torch.Tensor, Pool, Slots], Paths]
