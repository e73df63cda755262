"""The steps of a training run: the optimizer, the order of the texts, and the curve."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from csd.schema.arguments import check_number, check_seed, check_whole
from csd.training.eagle_head import TrainedHead
from csd.training.losses import Losses, losses
from csd.training.saved import Folder
from csd.training.target import Target
from csd.training.texts import Text, batches

# of AdamW; the gradient's norm is cut at CLIP
BETAS, DECAY, CLIP = (0.9, 0.95), 0.01, 0.5
# the order of all epochs is made before the first step
MOST_EPOCHS = 10_000
# share of the steps in which the learning rate rises
WARM = 0.05


@dataclass(frozen=True)
class Recipe:
    """Settings of a head's training; the arguments of `train_head` of these names."""

    epochs: int = 4
    batch: int = 2048
    learning_rate: float = 5e-4
    token_weight: float = 0.1
    noise: float = 0.1
    held_out: float = 0.05
    every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1, MOST_EPOCHS)
        for name in ("batch", "every"):
            check_whole(name, getattr(self, name), 1)
        for name in ("token_weight", "noise"):
            check_number(name, getattr(self, name), 0)
        check_number("learning_rate", self.learning_rate, 0, above=True)
        check_number("held_out", self.held_out, 0, 0.5)
        check_seed(self.seed)


class Run:
    """A head, its optimizer and its curve; a step depends on them, the seed and its number only."""

    def __init__(
        self, target: Target, recipe: Recipe, learnt: list[Text], kept: list[Text],
        dtype: torch.dtype,
    ):  # fmt: skip
        self.target, self.recipe = target, recipe
        self.head = TrainedHead(target.config, dtype, target.device, recipe.seed)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), recipe.learning_rate, BETAS, weight_decay=DECAY
        )
        self.plan = [
            texts
            for epoch in range(recipe.epochs)
            for texts in batches(learnt, recipe.batch, random.Random(f"{recipe.seed} {epoch}"))
        ]
        self.held_out = batches(kept, recipe.batch)
        self.step, self.tokens = 0, 0
        self.curve: list[dict[str, Any]] = []
        self.since = Losses()  # the last row

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.curve = state["step"], state["tokens"], state["curve"]

    def train(
        self, folder: Folder, settings: dict[str, Any], progress: bool,
        callback: Callable[[dict[str, Any]], object] | None,
    ) -> None:  # fmt: skip
        from tqdm import tqdm

        # a bar is for a terminal, or where it is asked for
        with tqdm(
            total=len(self.plan), initial=self.step, unit="step", disable=not progress
        ) as bar:
            while self.step < len(self.plan):
                found = self._learn(self.plan[self.step])
                self.since.add(found)
                shows = {"loss": f"{found.mean(self.recipe.token_weight):.3f}"}
                if self.step % self.recipe.every == 0 or self.step == len(self.plan):
                    self.curve.append(self._measured())
                    folder.save({"settings": settings, **self._state()})
                    if callback is not None:
                        callback(self.curve[-1])
                if self.curve and self.curve[-1]["acceptance"] is not None:
                    shows["acceptance"] = f"{self.curve[-1]['acceptance']:.3f}"
                bar.set_postfix(shows)
                bar.update()

    def _learn(self, texts: list[Text]) -> Losses:
        """One step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._rate()
        found = self._losses(texts, self.recipe.token_weight)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += sum(len(text.tokens) for text in texts)
        return found

    def _rate(self) -> float:
        """Share of the learning rate at this step: it rises, then falls to 0."""
        steps = len(self.plan)
        warm = max(1, round(WARM * steps))
        return min((self.step + 1) / warm, (steps - self.step) / max(steps - warm, 1))

    def _losses(self, texts: list[Text], weight: float | None = None) -> Losses:
        """Losses of a batch, with gradients and noise where a weight is given."""
        device, lengths = self.target.device, [len(text.tokens) for text in texts]
        states = self.target.states(texts)
        token = torch.tensor([t for text in texts for t in text.tokens], device=device)
        # a pair is a token and the state before it; of a text's last token nothing is learnt
        starts = [sum(lengths[:i]) for i in range(len(texts))]
        pairs = [a + i for a, n in zip(starts, lengths, strict=True) for i in range(1, n - 1)]
        learnt = [a + i for a, text in zip(starts, texts, strict=True) for i in text.learnt]
        row = {place: r for r, place in enumerate(pairs)}
        rows = torch.tensor([row[place] for place in learnt], device=device)
        at, place = torch.tensor(pairs, device=device), torch.tensor(learnt, device=device)
        before = states[at - 1]
        if weight is not None:
            before = before + self._noise(before)
        embedded = F.embedding(token[at], self.target.embedding)
        guess = self.head(embedded, before, [n - 2 for n in lengths])
        return losses(self.target, guess[rows], states[place], token[place + 1], weight)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """Uniform in (-noise, noise), a function of the seed and the step."""
        key = random.Random(f"noise {self.recipe.seed} {self.step}").getrandbits(63)
        generator = torch.Generator(like.device).manual_seed(key)
        drawn = torch.rand(like.shape, generator=generator, device=like.device)
        return ((2 * drawn - 1) * self.recipe.noise).to(like.dtype)

    @torch.no_grad()
    def _measured(self) -> dict[str, Any]:
        """A row of the curve."""
        weight, kept = self.recipe.token_weight, Losses()
        for texts in self.held_out:
            kept.add(self._losses(texts))
        row = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": self.since.mean(weight),
            "held_out_loss": kept.mean(weight) if kept.places else None,
            "acceptance": kept.acceptance if kept.places else None,
        }
        self.since = Losses()
        return row

    def _state(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "tokens": self.tokens, "curve": self.curve,
        }  # fmt: skip
