"""Training of EAGLE-1 and 2 heads (arXiv 2401.15077): compares guessed states with the target's.

The head has gradients, and parameters with their published names. For token t[i] and the target's
state f[i-1] before it, with E the target's embedding:

    x = fc [E t[i], f[i-1]],   x = x + attention(x),   f'[i] = x + mlp(norm(x))

`csd.research.draft_models.eagle.EagleHead` computes the same, one level at a time. The loss is

    L = smooth_l1(f', f) + w * cross_entropy(softmax(head f), log_softmax(head f'))

Both terms are means over the learnt positions; smooth_l1 also over the width of a state. The
distribution is the target's at temperature 1. `Losses` also has the acceptance of a draft.
"""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from csd.models.fused.config import ModelConfig
from csd.research.training.head_parts import DraftHead, HeadLayer
from csd.research.training.recipe import Losses, Method, Recipe
from csd.research.training.target import Target, causal
from csd.research.training.texts import Pairs, Text

# rows whose logits are in memory at once
ROWS = 256


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
    dtype = torch.promote_types(guess.dtype, torch.float32)
    by_state = F.smooth_l1_loss(guess.to(dtype), states.to(dtype), reduction="none").mean(-1).sum()
    state_loss = float(by_state.detach())
    summed = Losses(tokens=[0.0], hits=[0], places=[len(guess)], states=state_loss)
    parts = []
    for a in range(0, len(guess), ROWS):
        rows = slice(a, a + ROWS)
        with torch.no_grad():
            p = target.logits(states[rows]).to(dtype).softmax(-1)
            z = target.logits(guess[rows].detach()).to(dtype)
            total = z.logsumexp(-1, keepdim=True)
            # sum p (total - z), whose gradient with respect to z is softmax(z) - p
            summed.tokens[0] += float(total.sum() - torch.dot(p.flatten(), z.flatten()))
            if weight is None:
                summed.hits[0] += int((z.argmax(-1) == following[rows]).sum())
            else:
                parts.append(target.logits_backward(z.sub_(total).exp_().sub_(p)))
    if weight is not None:
        per_place = guess.new_ones(()).to(dtype) / len(guess)
        by_token = torch.cat(parts).to(guess.dtype) * (weight / len(guess))
        torch.autograd.backward([by_state, guess], [per_place, by_token])
    return summed


class TrainedHead(DraftHead):
    """Head that reads the target's last states; its logits come from the target's own head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int):
        super().__init__(config, dtype, device)
        c = config
        self.fc = nn.Linear(2 * c.hidden, c.hidden, bias=False, **self.factory)
        self.layers = nn.ModuleList([HeadLayer(c, self.intermediate, c.hidden, **self.factory)])
        self._begin(seed)

    @torch.no_grad()
    def _begin(self, seed: int) -> None:
        super()._begin(seed)
        # initially the guess f' = fc [E t, f] is the state before, f, plus a random projection of
        # the embedding
        hidden = self.config.hidden
        self.fc.weight[:, hidden:] = torch.eye(hidden)

    def forward(
        self,
        embedded: torch.Tensor,  # [M, hidden], embeddings of tokens
        before: torch.Tensor,  # [M, hidden], the target's states before them
        lengths: list[int],  # lengths of the concatenated texts; they sum to M
    ) -> torch.Tensor:
        """Guessed states [M, hidden] of the tokens. A text's first pair has position 0."""
        layer: Any = self.layers[0]
        attention = layer.self_attn
        x = self._times(self.fc, torch.cat([embedded, before], -1).to(self.dtype))
        position = torch.cat([torch.arange(n, device=x.device) for n in lengths])
        q, k = (self._heads(y, x, position) for y in (attention.q_proj, attention.k_proj))
        v = self._heads(attention.v_proj, x)
        return self._after(layer, x, causal(q, k, v, lengths, self.scale))


class ByStates(Method):
    """Training of a head that reads the target's last states, with added noise."""

    def __init__(self, target: Target, recipe: Recipe, dtype: torch.dtype):
        assert recipe.token_weight is not None and recipe.noise is not None
        self.target, self.seed = target, recipe.seed
        self.weights, self.noise = [recipe.token_weight], recipe.noise
        self.head = TrainedHead(target.config, dtype, target.device, recipe.seed)

    def losses(self, texts: list[Text], step: int | None = None) -> Losses:
        states, pairs = self.target.states(texts), Pairs(texts, self.target.device)
        before = states[pairs.at - 1]
        if step is not None:
            before = before + self._noise(before, step)
        embedded = F.embedding(pairs.token[pairs.at], self.target.embedding)
        guess = self.head(embedded, before, pairs.lengths)[pairs.rows]
        weight = None if step is None else self.weights[0]
        following = pairs.token[pairs.learnt_at + 1]
        return losses(self.target, guess, states[pairs.learnt_at], following, weight)

    def _noise(self, like: torch.Tensor, step: int) -> torch.Tensor:
        """Uniform noise in (-noise, noise), shaped like `like`, fixed by the seed and the step."""
        key = random.Random(f"noise {self.seed} {step}").getrandbits(63)
        generator = torch.Generator(like.device).manual_seed(key)
        drawn = torch.rand(like.shape, generator=generator, device=like.device)
        return ((2 * drawn - 1) * self.noise).to(like.dtype)
