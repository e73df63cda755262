"""Next-token distributions of a drafting network, and the calibration of draft probabilities.

A node's distribution is the softmax of its logits divided by a temperature, cut by the sample's
filters; it covers the CANDIDATES likeliest tokens. With the verifier "match" the noise g that
samples the target is known in advance, and the estimated probability of a child is

    p(t) = exp(beta (log q_t + g_t)) / [ sum over candidates + exp(beta (log tail + gamma)) ]

with tail the mass of all other tokens and gamma the mean of a Gumbel. For greedy samples p = q.
The graph uses the same form (`csd/kernels/draft/`).

Estimates of the graph and of a model are not comparable, and neither is a frequency. For a common
pool each estimate is replaced by its measured acceptance (`Reliability`):

    r(kind, p) = (hits + PRIOR p) / (seen + PRIOR)      over tokens of this kind and about this p

A token is counted if the sample reached its parent. Kinds: drafted by the graph, by the model, or
by both; a token of both has the larger estimate. About the last LATEST tokens per bin count.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from csd.kernels.common.noise import SAMPLE, gumbel_words, philox_words
from csd.kernels.draft.constants import EULER_GAMMA, TAIL, DraftNoise
from csd.state.slots import Slots

CANDIDATES = 128
# sharpness of the coupling to noise
BETA = 0.7


@dataclass(slots=True)
class Distributions:
    """Distributions of F nodes over C candidates, likeliest tokens first."""

    token: np.ndarray  # [F, C] int64
    log: np.ndarray  # [F, C] float64, log q, -inf for filtered tokens
    tail: np.ndarray  # [F], mass of all other tokens

    def renormalised(self) -> np.ndarray:
        """Probabilities [F, C] float64 over the candidates, normalised to sum 1."""
        q = np.exp(self.log)
        return q / q.sum(1, keepdims=True)


def distributions(
    logits: torch.Tensor, slot: list[int], slots: Slots, temperature: float | None
) -> Distributions:
    """Distributions of nodes of slots `slot` [F] with logits [F, V]; no repetition penalty.

    temperature: None means the sample's own.
    """
    s = torch.tensor(slot).to(logits.device)
    token, log = distribution_tensors(logits, s, slots, temperature)
    log_q = log.numpy(force=True)
    tail = 1 - np.exp(log_q).sum(1)
    return Distributions(token.numpy(force=True), log_q, tail.clip(min=0))


def distribution_tensors(
    logits: torch.Tensor, s: torch.Tensor, slots: Slots, temperature: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [F, C] int64 and log q [F, C] float64, on the device, of nodes of slots s [F]."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = slots.temperature[s].to(z.dtype)
    greedy = own <= 0
    heat = own if temperature is None else torch.full_like(own, temperature)
    z = z / torch.where(greedy, 1, heat)[:, None]
    top = z.topk(min(CANDIDATES, z.shape[1]), sorted=True)
    log = top.values - z.logsumexp(-1, keepdim=True)
    q = log.exp()
    rank = torch.arange(q.shape[1], device=q.device)
    k = slots.top_k[s][:, None]
    allowed = (k <= 0) | (rank < k)
    allowed &= q.cumsum(-1) - q < slots.top_p[s][:, None]
    allowed &= q >= slots.min_p[s][:, None] * q[:, :1]
    return top.indices, torch.where(allowed | greedy[:, None], log, -torch.inf).double()


def expected(
    dist: Distributions,
    slot: list[int],
    position: list[int],
    slots: Slots,
    noise: DraftNoise | None,
) -> np.ndarray:
    """Probabilities p(t) [F, C] of the candidates with the verifier "match".

    position: index of the token after each node. noise: replaces the slots' own.
    """
    s, positions = np.array(slot), np.array(position)
    if noise is not None:
        places = (torch.from_numpy(x) for x in (s, positions, dist.token))
        g = noise(*places).numpy()
    else:
        key, sample = (x.numpy(force=True)[s][:, None] for x in (slots.key, slots.sample))
        g = gumbel_words(philox_words(key, dist.token, positions[:, None], sample, SAMPLE))
    score = np.exp(BETA * (dist.log + g))
    # if a filter cuts candidates, all other tokens are cut too, so the tail has no mass
    cut = np.isneginf(dist.log).any(1)
    tail = np.exp(BETA * (np.log(dist.tail.clip(min=TAIL)) + EULER_GAMMA))
    coupled = score / (score.sum(1) + np.where(cut, 0, tail))[:, None]
    greedy = slots.temperature.numpy(force=True)[s] <= 0
    return np.where(greedy[:, None], np.exp(dist.log), coupled)


def expected_tensors(log: torch.Tensor, word: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """`expected` on the device: p(t) [F, C] from log q [F, C].

    word: [F, C], noise words of the tokens. greedy: [F] bool, True for nodes of greedy samples.
    """
    q = log.exp()
    # the same as `gumbel_words`
    u = ((0xFFFFFFFF - word).double() + 0.5) * 2.0**-32
    score = (BETA * (log - (-u.log()).log())).exp()
    tail = (BETA * ((1 - q.sum(1)).clamp(min=TAIL).log() + EULER_GAMMA)).exp()
    tail = torch.where(log.isneginf().any(1), 0, tail)
    coupled = score / (score.sum(1) + tail)[:, None]
    return torch.where(greedy[:, None], q, coupled)


GRAPH, MODEL, BOTH = 0, 1, 2
BINS, PRIOR, LATEST = 24, 8.0, 512


def bin_of(p: float) -> int:
    """Bin of p, in half octaves: 0 for p = 1, 2 for p = 1/2."""
    return min(int(-2 * math.log2(max(p, 1e-9))), BINS - 1)


class _Counts:
    """Numbers of accepted tokens (hits) and of counted tokens (seen), per bin."""

    def __init__(self) -> None:
        self.hits: dict[Any, float] = defaultdict(float)
        self.seen: dict[Any, float] = defaultdict(float)

    def share(self, index: Any, expected: float) -> float:
        """Share of accepted tokens, `expected` before any observation."""
        return (self.hits[index] + PRIOR * expected) / (self.seen[index] + PRIOR)

    def count(self, index: Any, hit: bool) -> None:
        self.hits[index] += hit
        self.seen[index] += 1
        if self.seen[index] > LATEST:
            self.hits[index] /= 2
            self.seen[index] /= 2


class Reliability(_Counts):
    """Measured acceptance of tokens, per kind and bin of the estimate."""

    def __call__(self, kind: int, p: float) -> float:
        """Calibrated probability that the token is sampled at its parent."""
        return self.share((kind, bin_of(p)), p)

    def learn(self, kind: int, p: float, hit: bool) -> None:
        self.count((kind, bin_of(p)), hit)


class DeviceReliability:
    """`Reliability` of a model alone, on the device: float64 counts at fixed addresses."""

    def __init__(self, device: torch.device):
        self.hits, self.seen = torch.zeros(2, BINS, dtype=torch.float64, device=device)

    def forget(self) -> None:
        self.hits.zero_()
        self.seen.zero_()

    def __call__(self, p: torch.Tensor) -> torch.Tensor:
        """Calibrated probabilities, float64, of estimates of any shape."""
        index = self._bin(p)
        return (self.hits[index] + PRIOR * p) / (self.seen[index] + PRIOR)

    def learn(self, p: torch.Tensor, tested: torch.Tensor, hit: torch.Tensor) -> None:
        """Count tested tokens [M], and those of them that were sampled (hit [M]).

        The counts are integers, so their sums are exact in any order.
        """
        bins = torch.arange(BINS, device=p.device)
        mine = (self._bin(p)[:, None] == bins) & tested[:, None]
        self.hits.add_((mine & hit[:, None]).sum(0))
        self.seen.add_(mine.sum(0))
        half = torch.where(self.seen > LATEST, 0.5, 1.0)
        self.hits.mul_(half)
        self.seen.mul_(half)

    @staticmethod
    def _bin(p: torch.Tensor) -> torch.Tensor:
        """`bin_of` on the device."""
        return (-2 * p.clamp(min=1e-9).log2()).long().clamp(max=BINS - 1)


class Levels(_Counts):
    """Measured share of nodes with an accepted draw, by depth."""

    def __call__(self, depth: int) -> float:
        """Expected share, 0.6 before any observation."""
        return self.share(depth, 0.6)
