"""Steps of a training run: the optimizer, the order of the texts, and the curve.

Its state is saved in the folder of the head (`Folder`), from which the same command resumes.
"""

import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from csd.research.training.recipe import Losses, Method, Recipe
from csd.research.training.texts import Text, batches
from csd.utils.files import WholeFile, check_no_pipes, naming_file
from csd.utils.phases import can_write

STATE = "training.pt"


class Folder:
    """Folder of a head: the state, with the curve, during training, and the head's files after it.

    Raises ValueError if it already contains a head, or another process is training one there;
    OSError, naming the file, if it cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with naming_file(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            check_no_pipes(self.path)
        if (self.path / "model.safetensors").exists():
            raise ValueError(f"out must be a folder without a head, got {str(path)!r}")
        # checked and locked before the first step
        self._weights = WholeFile(self.path / "model.safetensors")

    def state(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The last saved state, None for a new run. Raises ValueError if its settings differ."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            # states of older versions, which trained only EAGLE-2 heads, have no "eagle"
            have = {"eagle": 2} | state["settings"]
        except Exception as error:
            raise ValueError(f"{path} is not the state of a training run: {error}") from error
        keys = [k for k in {**have, **settings} if have.get(k) != settings.get(k)]
        if keys:
            what = ", ".join(f"{k} {have.get(k)!r}, now {settings.get(k)!r}" for k in keys)
            raise ValueError(
                f"{path} was written with other settings ({what}); choose another folder, or "
                "remove it"
            )
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write the state atomically: a crash leaves the new state or the previous one."""
        data = BytesIO()
        # into memory: for a full disk torch raises no OSError
        torch.save(state, data)
        with WholeFile(self.path / STATE) as file:
            file.write([data.getvalue()])

    def finish(self, config: bytes, weights: bytes, curve: bytes) -> None:
        """Write the head and its curve, and remove the state."""
        for name, data in (("config.json", config), ("curve.jsonl", curve)):
            WholeFile(self.path / name).write([data])
        self._weights.write([weights])
        (self.path / STATE).unlink(missing_ok=True)

    def close(self) -> None:
        self._weights.close()


# AdamW's betas and weight decay; the gradient norm is clipped at CLIP
BETAS, DECAY, CLIP = (0.9, 0.95), 0.01, 0.5
# share of the steps during which the learning rate rises
WARM = 0.05


class Run:
    """A head, its optimizer and curve; a step depends only on these, the seed and its number."""

    def __init__(self, method: Method, recipe: Recipe, learnt: list[Text], held_out: list[Text]):
        self.method, self.recipe, self.head = method, recipe, method.head
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), recipe.learning_rate, BETAS, weight_decay=DECAY
        )
        self.plan = [
            texts
            for epoch in range(recipe.epochs)
            for texts in batches(learnt, recipe.batch, random.Random(f"{recipe.seed} {epoch}"))
        ]
        self.held_out = batches(held_out, recipe.batch)
        self.step, self.tokens = 0, 0
        self.curve: list[dict[str, Any]] = []
        self.since = Losses.none(len(method.weights))  # since the last row of the curve

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.curve = state["step"], state["tokens"], state["curve"]

    def train(
        self,
        folder: Folder,
        settings: dict[str, Any],
        progress: bool,
        callback: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        from tqdm import tqdm

        hidden = not (progress and can_write())
        with tqdm(total=len(self.plan), initial=self.step, unit="step", disable=hidden) as bar:
            while self.step < len(self.plan):
                losses = self._learn(self.plan[self.step])
                self.since.add(losses)
                shows = {"loss": f"{losses.mean(self.method.weights):.3f}"}
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
        """Run one optimizer step on a batch; returns its losses."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * self._rate()
        losses = self.method.losses(texts, self.step)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += sum(len(text.tokens) for text in texts)
        return losses

    def _rate(self) -> float:
        """Factor of the learning rate at this step: rises linearly to 1, then falls to 0."""
        steps = len(self.plan)
        warm = max(1, round(WARM * steps))
        return min((self.step + 1) / warm, (steps - self.step) / max(steps - warm, 1))

    @torch.no_grad()
    def _measured(self) -> dict[str, Any]:
        """Measure the held-out texts; returns a row of the curve, and resets `since`."""
        method, losses = self.method, Losses.none(len(self.method.weights))
        for texts in self.held_out:
            losses.add(method.losses(texts))
        row = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": self.since.mean(method.weights),
            "held_out_loss": losses.mean(method.weights) if self.held_out else None,
            **method.acceptance(losses),
        }
        self.since = Losses.none(len(method.weights))
        return row

    def _state(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "curve": self.curve,
        }
