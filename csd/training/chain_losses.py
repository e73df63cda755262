"""The loss of EAGLE-3 (arXiv 2503.01840) on the tokens that chains draft.

    L = 1/R sum over j of decay^j sum over chains of cross_entropy(p, lm_head norm(h'[j]))

R counts pairs that are learnt, each of which begins a chain. p is the target's distribution at
temperature 1 over the head's vocabulary, with sum 1. Places whose likeliest token is outside of it
have no loss, and no state is compared with the target's.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch

from csd.training.eagle3_head import Eagle3Head
from csd.training.losses import ROWS
from csd.training.pairs import Pairs
from csd.training.target import Target


@dataclass(slots=True)
class ChainLosses:
    """Sums by step [depth]: cross-entropy, tokens that are drafted, and places."""

    tokens: list[float]
    hits: list[int]
    places: list[int]

    @classmethod
    def none(cls, depth: int) -> "ChainLosses":
        return cls([0.0] * depth, [0] * depth, [0] * depth)

    def add(self, other: "ChainLosses") -> None:
        for step in range(len(self.places)):
            self.tokens[step] += other.tokens[step]
            self.hits[step] += other.hits[step]
            self.places[step] += other.places[step]

    def mean(self, decay: float) -> float:
        """L of all places."""
        return sum(decay**j * x for j, x in enumerate(self.tokens)) / self.places[0]

    @property
    def acceptance(self) -> list[float | None]:
        """Share of the samples' tokens that are the head's likeliest one, by step."""
        pairs = zip(self.hits, self.places, strict=True)
        return [hits / places if places else None for hits, places in pairs]


def chain_losses(
    target: Target,
    head: Eagle3Head,
    guesses: list[torch.Tensor],  # of each step, [R, hidden] and fewer rows
    states: torch.Tensor,  # [R, hidden], the target's last states at the learnt pairs
    pairs: Pairs,
    depth: int,
    decay: float | None = None,
) -> ChainLosses:
    """Losses of a batch; with a decay, gradients of L go to the head and what `guesses` came from.

    Logits of `ROWS` places are in memory at a time, the target's with those of one step. With a
    decay no place counts as a hit.
    """
    found, token = ChainLosses.none(depth), head.token
    kept = torch.promote_types(head.dtype, torch.float32)
    following = pairs.token[pairs.place + 1]
    # of each step, learnt pairs whose states are guessed, ascending
    at = [[base + step for base in pairs.chains(step)[0]] for step in range(len(guesses))]
    gradients: list[list[torch.Tensor]] = [[] for _ in guesses]
    for a in range(0, len(states), ROWS):
        b = min(a + ROWS, len(states))
        p = _distribution(target, states[a:b], token, kept)
        for step, guess in enumerate(guesses):
            first, last = bisect_left(at[step], a), bisect_left(at[step], b)
            if first == last:
                continue
            rows = torch.tensor(at[step][first:last], device=guess.device)
            x = guess[first:last].detach().requires_grad_(decay is not None)
            with torch.set_grad_enabled(decay is not None):
                z = head.logits(x).to(kept)
                loss = -(p[rows - a] * z.log_softmax(-1)).sum()
            found.tokens[step] += float(loss.detach())
            found.places[step] += last - first
            if decay is not None:
                (loss * (decay**step / len(states))).backward()
                assert x.grad is not None
                gradients[step].append(x.grad)
                continue
            drafted = z.argmax(-1) if token is None else token[z.argmax(-1)]
            found.hits[step] += int((drafted == following[rows]).sum())
    if decay is not None:
        torch.autograd.backward(guesses, [torch.cat(parts) for parts in gradients])
    return found


@torch.no_grad()
def _distribution(
    target: Target, states: torch.Tensor, token: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """p [r, Vd], 0 where the likeliest token of all is not the head's."""
    z = target.logits(states).to(dtype)
    if token is None:
        return z.softmax(-1)
    mine = z[:, token]
    inside = mine.amax(-1, keepdim=True) == z.amax(-1, keepdim=True)
    return mine.softmax(-1) * inside
