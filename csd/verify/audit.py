"""Audit of given tokens: how far each is from what its noise would have drawn.

Under `match` a token is a function of model, prompt, seed, sample index and the tokens before it,
so a claim to have sampled a token can be checked by one row of logits. At every row of the given
tokens, with s the perturbed score of an atom (`csd.kernels.verify`):

    gap = s(what is drawn) - s(the given token)      0 where they are the same token
        = how far the word lies from the token's part of the rest's mass, where both are in the rest
        = inf where the given token has no probability

At temperature 0 scores are logits. Rounding moves scores by as much as it moves logits, so a
small gap is a tie, and a large one shows other weights, settings or tokens.
"""

import math
from collections.abc import Mapping

import torch

from csd.kernels.noise import REST, SAMPLE, gumbel, philox_words_ref, uniform
from csd.kernels.ops import Ops
from csd.kernels.verify.constants import HEAD_WIDTH, MAX_HEAD
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.verify.given import GivenTokens
from csd.verify.target import processed


class Auditor(GivenTokens):
    """As `GivenTokens`; `gaps` has those of each sample's tokens, by noise key and index."""

    def __init__(self, tokens: Mapping[tuple[int, int], list[int]], ops: Ops, rows: int):
        super().__init__(tokens, ops, rows)
        self.gaps: dict[tuple[int, int], list[float]] = {key: [] for key in tokens}

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        given = super().verify(logits, pool, slots)
        drawn = self._ops.verify_all(logits, pool, slots).sample
        # rows of a slot are in the order of its tokens
        keys, samples = slots.key.tolist(), slots.sample.tolist()
        found = torch.zeros(pool.rows, dtype=torch.float64)
        for row in (drawn != given.sample).nonzero()[:, 0].tolist():
            pair = int(drawn[row]), int(given.sample[row])
            found[row] = _gap(row, *pair, logits, pool, slots)
        for s, gap in zip(pool.slot.tolist(), found.tolist(), strict=True):
            self.gaps[keys[s], samples[s]].append(gap)
        return given


def _gap(
    row: int, drawn: int, given: int, logits: torch.Tensor, pool: Pool, slots: Slots
) -> float:
    s = int(pool.slot[row])
    if slots.temperature[s] == 0:
        greedy = logits[row].double()
        return float(greedy[drawn] - greedy[given])
    law = processed(logits, torch.tensor([row], device=logits.device), pool, slots)[0].double()
    if law[given] == 0:
        return math.inf
    vocab, top_k = law.shape[0], int(slots.top_k[s])
    whole = 0 < top_k <= min(MAX_HEAD, vocab - 1)
    in_head = law > 0 if whole else law >= law.max() * math.exp(-HEAD_WIDTH)
    rest = torch.where(in_head, 0, law)
    place = slots.generated[s] + pool.depth[row]

    def word(token: int, stream: int) -> torch.Tensor:
        at = torch.tensor(token, device=law.device)
        return philox_words_ref(slots.key[s], at, place, slots.sample[s], stream)

    def score(token: int) -> float:
        mass = law[token] if in_head[token] else rest.sum()
        atom = token if in_head[token] else vocab
        return float(mass.log() + gumbel(word(atom, SAMPLE), torch.float64))

    if in_head[drawn] or in_head[given]:
        return max(score(drawn) - score(given), 0.0)
    share = rest.cumsum(0) / rest.sum()
    at = float(uniform(word(0, REST), torch.float64))
    return max(float(share[given] - rest[given] / rest.sum()) - at, at - float(share[given]), 0.0)
