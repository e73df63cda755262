"""Training of EAGLE-1 and 2 heads: compares guessed states with the target's."""

import random
from typing import Any

import torch
import torch.nn.functional as F

from csd.training.eagle_head import TrainedHead
from csd.training.losses import Losses, losses
from csd.training.pairs import Pairs
from csd.training.recipe import Recipe
from csd.training.target import Target
from csd.training.texts import Text


class ByStates:
    """Training of a head that reads the target's last states, with added noise."""

    def __init__(self, target: Target, recipe: Recipe, dtype: torch.dtype):
        assert recipe.token_weight is not None and recipe.noise is not None
        self.target, self.seed = target, recipe.seed
        self.token_weight, self.noise = recipe.token_weight, recipe.noise
        self.head = TrainedHead(target.config, dtype, target.device, recipe.seed)

    def none(self) -> Losses:
        return Losses()

    def losses(self, texts: list[Text], step: int | None = None) -> Losses:
        states, pairs = self.target.states(texts), Pairs(texts, self.target.device)
        before = states[pairs.at - 1]
        if step is not None:
            before = before + self._noise(before, step)
        embedded = F.embedding(pairs.token[pairs.at], self.target.embedding)
        guess = self.head(embedded, before, pairs.lengths)[pairs.rows]
        weight = None if step is None else self.token_weight
        following = pairs.token[pairs.place + 1]
        return losses(self.target, guess, states[pairs.place], following, weight)

    def mean(self, found: Losses) -> float:
        return found.mean(self.token_weight)

    def acceptance(self, found: Losses) -> dict[str, Any]:
        return {"acceptance": found.acceptance if found.places else None}

    def _noise(self, like: torch.Tensor, step: int) -> torch.Tensor:
        """Uniform noise in (-noise, noise), shaped like `like`, fixed by the seed and the step."""
        key = random.Random(f"noise {self.seed} {step}").getrandbits(63)
        generator = torch.Generator(like.device).manual_seed(key)
        drawn = torch.rand(like.shape, generator=generator, device=like.device)
        return ((2 * drawn - 1) * self.noise).to(like.dtype)
