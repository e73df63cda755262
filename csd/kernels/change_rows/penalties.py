"""Penalties on tokens that a row's prefix already contains."""

import torch

from csd.kernels.change_rows.prefix import Prefixes
from csd.state.logit_rules import Rules
from csd.state.slots import Slots


def penalise(x: torch.Tensor, path: torch.Tensor, s: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Returns rows x [R, V] of slots s [R] with the repetition penalty; path: [R, D].

    A slot's bitmap `seen` has the tokens of its prompt and sample.
    """
    vocab = x.shape[1]
    bit = torch.arange(32, device=x.device)
    bits = ((slots.seen[s][:, :, None] >> bit) & 1).flatten(1)[:, :vocab].bool()
    seen = torch.nn.functional.pad(bits, (0, 1))
    seen.scatter_(1, torch.where(path >= 0, path, vocab), True)
    penalty = slots.penalty[s].to(x.dtype)[:, None]
    # a slot without a penalty stores no bits, and a penalty of 1 changes nothing
    scaled = torch.where(x < 0, x * penalty, x / penalty)
    return torch.where(seen[:, :vocab] & (penalty != 1), scaled, x)


def subtract_counts(
    x: torch.Tensor, prefix: Prefixes, s: torch.Tensor, rules: Rules
) -> torch.Tensor:
    """Subtracts both penalties from x [R, V] in place and returns x; the prompt does not count."""
    vocab, of = x.shape[1], rules.of[s]
    token = prefix.token[:, prefix.prompt :]
    # counts are whole numbers, so sums are the same in any order
    count = x.new_zeros(x.shape[0], vocab + 1)
    one = torch.ones_like(token, dtype=x.dtype)
    count.scatter_add_(1, torch.where(token >= 0, token, vocab), one)
    count = count[:, :vocab]
    x -= rules.frequency[of].to(x.dtype)[:, None] * count
    x -= rules.presence[of].to(x.dtype)[:, None] * (count > 0)
    return x
