"""Draws from rows' heads and rests, and the likeliest tokens."""

import torch

from csd.kernels.noise import REST, SAMPLE, gumbel, philox_words_ref, uniform
from csd.kernels.verify.passes import Draws, Heads, Rows
from csd.state.slots import Slots
from csd.state.verdict import TOP


def draw_ref(heads: Heads, rows: Rows, slots: Slots, vocab: int) -> Draws:
    """Draws by the Gumbel maximum, a row's rest being token `vocab`; with the head's likeliest."""
    token, score, rest_mass = heads
    s, position, greedy, live = rows
    log_total = (head_sum(score.exp()) + rest_mass).log()
    # [R, heads + 1]: the head, then the rest
    atoms = torch.cat([token, torch.full_like(token[:, :1], vocab)], dim=1)
    mass = torch.cat([score, rest_mass.log()[:, None]], dim=1)
    word = philox_words_ref(
        slots.key[s][:, None], atoms, position[:, None], slots.sample[s][:, None], SAMPLE
    )
    noisy = torch.where(greedy[:, None], mass, mass + gumbel(word, mass.dtype))
    noisy[:, -1].masked_fill_(greedy, -torch.inf)
    # heads are in token order: the first maximum has the smallest id
    winner = (noisy == noisy.amax(-1, keepdim=True)).int().argmax(-1)
    sample = atoms.gather(1, winner[:, None])[:, 0]
    z_sample = mass.gather(1, winner[:, None])[:, 0]
    likeliest = _likeliest(token, score, log_total, greedy, live)
    return Draws(sample, z_sample - log_total, log_total, *likeliest)


def head_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums [M] of x [M, W], added in order, so that zeros at a row's end do not change the bits."""
    return x.cumsum(-1)[:, -1]


def draw_rest(
    rest: torch.Tensor, slots: Slots, s: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Draws a token of the rest [R, V] by inverse CDF in token order, clamped to its last token."""
    cdf = rest.cumsum(-1)
    word = philox_words_ref(
        slots.key[s], torch.zeros_like(position), position, slots.sample[s], REST
    )
    target = uniform(word, rest.dtype)[:, None] * cdf[:, -1:]
    token = (cdf <= target).sum(-1)
    ids = torch.arange(rest.shape[1], device=rest.device)
    return token.minimum(torch.where(rest > 0, ids, 0).amax(-1))


def _likeliest(
    token: torch.Tensor,
    score: torch.Tensor,
    log_total: torch.Tensor,
    greedy: torch.Tensor,
    live: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top 8 tokens and probabilities after the filters; for a greedy row, only the token drawn."""
    width = min(TOP, token.shape[1])
    # stable: equal scores stay in token order
    top, order = score.sort(dim=-1, descending=True, stable=True)
    pad = (0, TOP - width)
    top_token = torch.nn.functional.pad(token.gather(1, order[:, :width]), pad, value=-1)
    top_prob = (top[:, :width] - log_total[:, None]).exp().float()
    top_prob = torch.nn.functional.pad(top_prob, pad)
    one_hot = (torch.arange(TOP, device=token.device) == 0).to(top_prob.dtype)
    top_prob = torch.where(greedy[:, None], one_hot, top_prob)
    present = (top_prob > 0) & live[:, None]
    return torch.where(present, top_token, -1), torch.where(present, top_prob, 0)
