"""What a drafting network expects next, over its likeliest tokens.

A node's law is the softmax of its logits over a temperature, cut as the sample's own filters cut
the target. CANDIDATES tokens are kept. Where samples match the target, the noise g that will sample
it is known, and a child is expected with

    p(t) = exp(beta (log q_t + g_t)) / [ sum of it over the kept + exp(beta (log rest + gamma)) ]

rest being the mass that is not kept and gamma the mean of a Gumbel; with greedy samples p = q.
The same form as the graph's (`csd/kernels/draft_tree/`).
"""

from dataclasses import dataclass

import numpy as np
import torch

from csd.kernels.draft_tree.constants import EULER_GAMMA, TAIL, DraftNoise
from csd.kernels.noise import SAMPLE, gumbel_words, philox_words
from csd.state.slots import Slots

CANDIDATES = 128
# how sharply the noise decides
BETA = 0.7


@dataclass(slots=True)
class Laws:
    """Of F nodes, likeliest tokens first."""

    token: np.ndarray  # [F, C] int64
    log: np.ndarray  # [F, C] float64, log q, -inf where a filter cuts
    rest: np.ndarray  # [F], mass of tokens that are not kept

    def renormalised(self) -> np.ndarray:
        """[F, C] float64 laws of sum 1."""
        q = np.exp(self.log)
        return q / q.sum(1, keepdims=True)


def laws(
    logits: torch.Tensor, slot: list[int], slots: Slots, temperature: float | None,
    candidates: int = CANDIDATES,
) -> Laws:  # fmt: skip
    """logits: [F, V] of nodes of `slot` [F]. temperature: None is the sample's own.

    The repetition penalty is left out: a draft is only ever a guess.
    """
    s = torch.tensor(slot).to(logits.device)
    token, log = law_tensors(logits, s, slots, temperature, candidates)
    found = log.numpy(force=True)
    rest = 1 - np.exp(found).sum(1)
    return Laws(token.numpy(force=True), found, rest.clip(min=0))


def law_tensors(
    logits: torch.Tensor, s: torch.Tensor, slots: Slots, temperature: float | None,
    candidates: int = CANDIDATES,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tokens [F, C] int64 and log q [F, C] float64 of nodes of slots s [F], on the device."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = slots.temperature[s].to(z.dtype)
    greedy = own <= 0
    heat = own if temperature is None else torch.full_like(own, temperature)
    z = z / torch.where(greedy, 1, heat)[:, None]
    top = z.topk(min(candidates, z.shape[1]), sorted=True)
    log = top.values - z.logsumexp(-1, keepdim=True)
    q = log.exp()
    rank = torch.arange(q.shape[1], device=q.device)
    k = slots.top_k[s][:, None]
    kept = (k <= 0) | (rank < k)
    kept &= q.cumsum(-1) - q < slots.top_p[s][:, None]
    kept &= q >= slots.min_p[s][:, None] * q[:, :1]
    return top.indices, torch.where(kept | greedy[:, None], log, -torch.inf).double()


def expected(
    found: Laws, slot: list[int], position: list[int], slots: Slots, noise: DraftNoise | None
) -> np.ndarray:
    """[F, C]: p(t) of each kept token, where samples match the target.

    position: number of the token that follows the node. noise: in place of the slots' own.
    """
    s, at = np.array(slot), np.array(position)
    if noise is not None:
        places = (torch.from_numpy(x) for x in (s, at, found.token))
        g = noise(*places).numpy()
    else:
        key, sample = (x.numpy(force=True)[s][:, None] for x in (slots.key, slots.sample))
        g = gumbel_words(philox_words(key, found.token, at[:, None], sample, SAMPLE))
    score = np.exp(BETA * (found.log + g))
    # what a filter cut is not sampled, so its mass is nowhere
    cut = np.isneginf(found.log).any(1)
    rest = np.exp(BETA * (np.log(found.rest.clip(min=TAIL)) + EULER_GAMMA))
    coupled = score / (score.sum(1) + np.where(cut, 0, rest))[:, None]
    greedy = slots.temperature.numpy(force=True)[s] <= 0
    return np.where(greedy[:, None], np.exp(found.log), coupled)


def expected_tensors(
    log: torch.Tensor, word: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """`expected` on the device: [F, C] of log q [F, C], the words of the tokens' noise and the
    nodes whose samples are greedy [F]."""
    q = log.exp()
    # as `gumbel_words` has it
    u = ((0xFFFFFFFF - word).double() + 0.5) * 2.0**-32
    score = (BETA * (log - (-u.log()).log())).exp()
    rest = (BETA * ((1 - q.sum(1)).clamp(min=TAIL).log() + EULER_GAMMA)).exp()
    rest = torch.where(log.isneginf().any(1), 0, rest)
    coupled = score / (score.sum(1) + rest)[:, None]
    return torch.where(greedy[:, None], q, coupled)
