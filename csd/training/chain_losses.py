"""Loss of EAGLE-3 (arXiv 2503.01840) on the tokens that chains draft.

    L = 1/R sum over j of decay^j sum over chains of cross_entropy(p, lm_head norm(h'[j]))

R is the number of learnt pairs, each of which begins a chain. p is the target's distribution at
temperature 1 over the head's vocabulary, normalised to sum 1. Positions whose likeliest token is
outside that vocabulary have no loss. No state is compared with the target's.
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
    """Sums per step, lists of length depth: cross-entropy, correctly drafted tokens, positions."""

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
        """L over all positions."""
        return sum(decay**j * x for j, x in enumerate(self.tokens)) / self.places[0]

    @property
    def acceptance(self) -> list[float | None]:
        """Per step, share of the samples' tokens that are the head's likeliest; None if none."""
        pairs = zip(self.hits, self.places, strict=True)
        return [hits / places if places else None for hits, places in pairs]


def chain_losses(
    target: Target,
    head: Eagle3Head,
    guesses: list[torch.Tensor],  # per step, [R, hidden], later with fewer rows
    states: torch.Tensor,  # [R, hidden], the target's last states at the learnt pairs
    pairs: Pairs,
    depth: int,
    decay: float | None = None,
) -> ChainLosses:
    """Losses of a batch; with a decay, backpropagates L through the head's logits and `guesses`.

    Logits of only `ROWS` positions are in memory: the target's, and the head's of one step. With a
    decay hits are not counted.
    """
    found, token = ChainLosses.none(depth), head.token
    kept = torch.promote_types(head.dtype, torch.float32)
    following = pairs.token[pairs.place + 1]
    # per step, ascending numbers of the learnt pairs whose states are guessed
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
    """p [r, Vd]; rows whose likeliest token is not in the head's vocabulary are 0."""
    z = target.logits(states).to(dtype)
    if token is None:
        return z.softmax(-1)
    mine = z[:, token]
    inside = mine.amax(-1, keepdim=True) == z.amax(-1, keepdim=True)
    return mine.softmax(-1) * inside
