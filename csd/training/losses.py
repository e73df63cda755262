"""Losses of EAGLE (arXiv 2401.15077) on guessed states, and the acceptance of a draft.

    L = smooth_l1(f', f) + w * cross_entropy(softmax(head f), log_softmax(head f'))

Both are means over the learnt positions; smooth_l1 also over the width of a state. The distribution
is the target's at temperature 1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from csd.training.target import Target

# rows whose logits are in memory at once
ROWS = 256


@dataclass(slots=True)
class Losses:
    """Sums over positions: losses of states and distributions, correctly drafted next tokens, and
    the number of positions."""

    states: float = 0.0
    tokens: float = 0.0
    hits: int = 0
    places: int = 0

    def add(self, other: "Losses") -> None:
        self.states, self.tokens = self.states + other.states, self.tokens + other.tokens
        self.hits, self.places = self.hits + other.hits, self.places + other.places

    def mean(self, weight: float) -> float:
        """L over all positions."""
        return (self.states + weight * self.tokens) / self.places

    @property
    def acceptance(self) -> float:
        """Share of the samples' tokens that are the head's likeliest."""
        return self.hits / self.places


def losses(
    target: Target,
    guess: torch.Tensor,  # [R, hidden]
    states: torch.Tensor,  # [R, hidden], the target's
    following: torch.Tensor,  # [R] int64, the samples' next tokens
    weight: float | None = None,
) -> Losses:
    """Losses of positions; with a weight, backpropagates the mean L through `guess`.

    Logits of only `ROWS` positions are in memory at a time, for both networks. With a weight hits
    are not counted, which would take another pass over the logits.
    """
    kept = torch.promote_types(guess.dtype, torch.float32)
    by_state = F.smooth_l1_loss(guess.to(kept), states.to(kept), reduction="none").mean(-1).sum()
    found, parts = Losses(float(by_state.detach()), places=len(guess)), []
    for a in range(0, len(guess), ROWS):
        rows = slice(a, a + ROWS)
        with torch.no_grad():
            p = target.logits(states[rows]).to(kept).softmax(-1)
            z = target.logits(guess[rows].detach()).to(kept)
            total = z.logsumexp(-1, keepdim=True)
            # sum p (total - z), whose gradient with respect to z is softmax(z) - p
            found.tokens += float(total.sum() - torch.dot(p.flatten(), z.flatten()))
            if weight is None:
                found.hits += int((z.argmax(-1) == following[rows]).sum())
            else:
                parts.append(target.logits_backward(z.sub_(total).exp_().sub_(p)))
    if weight is not None:
        per_place = guess.new_ones(()).to(kept) / len(guess)
        by_token = torch.cat(parts).to(guess.dtype) * (weight / len(guess))
        torch.autograd.backward([by_state, guess], [per_place, by_token])
    return found
