"""The losses of EAGLE (arXiv 2401.15077) on guessed states, and the acceptance of a draft.

    L = smooth_l1(f', f) + w * cross_entropy(softmax(head f), log_softmax(head f'))

means over the places that are learnt; smooth_l1 also over the width of a state. The distribution is
the target's at temperature 1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from csd.training.target import Target

# rows whose logits are in memory at once
ROWS = 256


@dataclass(slots=True)
class Losses:
    """Sums over places: states' and distributions' loss, and places whose next token is drafted."""

    states: float = 0.0
    tokens: float = 0.0
    hits: int = 0
    places: int = 0

    def add(self, other: "Losses") -> None:
        self.states, self.tokens = self.states + other.states, self.tokens + other.tokens
        self.hits, self.places = self.hits + other.hits, self.places + other.places

    def mean(self, weight: float) -> float:
        """L of all places."""
        return (self.states + weight * self.tokens) / self.places

    @property
    def acceptance(self) -> float:
        """Share of the samples' tokens that are the head's likeliest one."""
        return self.hits / self.places


def losses(
    target: Target,
    guess: torch.Tensor,  # [R, hidden]
    states: torch.Tensor,  # [R, hidden], the target's
    following: torch.Tensor,  # [R] int64, the samples' next tokens
    weight: float | None = None,
) -> Losses:
    """Losses of places; with a weight, gradients of the mean L go to what `guess` came from.

    Logits of `ROWS` places are in memory at a time, and those of both networks for no longer. With
    a weight no place counts as a hit, which would take another pass over the logits.
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
            # sum p (total - z), whose gradient by z is softmax(z) - p
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
