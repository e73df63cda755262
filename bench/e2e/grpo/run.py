"""One run of GRPO, by csd's trainer or by TRL's alone, with figures of every step.

All sides are watched by the same code: the sampler's log-probability of every token is compared
with the one that the trainer computes before the first update with it. `generate`, TRL's own
sampler, returns none, so that a logits processor computes them; the seconds of this are left out.
`generate_batch` returns them, within its seconds. After the last step csd draws an answer to each
of some problems that no run has trained on, with the same seed for every run.
"""

import os
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback

import csd
from bench.lib.common import machine
from bench.lib.models import path_of
from bench.lib.resident import reset_peak, resident
from csd.integrations.trl import GRPOTrainer
from csd.models.load import gguf_module, tokenizer_of

EXAMPLE = Path(__file__).parents[3] / "examples/grpo/grpo_letters.py"
# figures of a step -> their keys in TRL's log
LOGGED = {
    "reward": "reward",
    "solved": "rewards/solved/mean",
    "clip_fraction": "clip_ratio/region_mean",
    "kl": "kl",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "tau": "csd/tau",
}
# of a figure in the file, 8 for the others
DECIMALS = {"reward": 4, "solved": 4, "entropy": 4, "grad_norm": 4, "tau": 3, "memory_mb": 0}
DECIMALS |= dict.fromkeys(("seconds", "cpu_seconds", "rollout_seconds", "train_seconds"), 3)


class Drawn(LogitsProcessor):
    """Notes the log-probability of each token that `generate` draws, at temperature 1."""

    def __init__(self) -> None:
        self.columns: list[torch.Tensor] = []  # of [B]
        self.seconds = 0.0
        self._last: torch.Tensor | None = None  # [B, V]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        self.add(input_ids[:, -1:])
        self._last = scores.float().log_softmax(-1)
        self.seconds += time.perf_counter() - start
        return scores

    def add(self, tokens: torch.Tensor) -> None:
        """tokens: [B, 1], drawn from the last scores."""
        if self._last is not None:
            self.columns.append(self._last.gather(1, tokens)[:, 0])


class Watched:
    """A trainer's mixin: agreement of trainer and sampler, tokens and seconds, of each update."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.figures: dict[str, float] = {}
        # seconds of watching, which are in no figure
        self.watching = 0.0
        self._watched_step = -1
        self._now: torch.Tensor | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self._watched_step = self.state.global_step
        return batch

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if torch.is_grad_enabled():
            self._now = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        start = time.perf_counter()
        if self.state.global_step == self._watched_step:
            mask = inputs["completion_mask"].bool()
            change = (self._now - inputs["sampling_per_token_logps"])[mask]
            low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
            ratio = change.exp()
            self.figures |= {
                "tokens": int(mask.sum()),
                "difference": float(change.abs().max()),
                "outside_clip": float(((ratio < low) | (ratio > high)).float().mean()),
            }
        self.watching += time.perf_counter() - start
        return loss


class Csd(Watched, GRPOTrainer):
    """csd's trainer, whose log has the seconds by part."""


class Timed(Watched, trl.GRPOTrainer):
    """TRL's trainer, with the seconds of a step by part."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._drawing = 0.0

    def _completions_by(self, name: str, sampler: Any, *args: Any, **kwargs: Any) -> list:
        """Completions of a turn with `sampler` in place of the model's method `name`."""
        model = self.accelerator.unwrap_model(self.model)
        setattr(model, name, sampler)
        try:
            return super()._generate_single_turn(*args, **kwargs)[0]
        finally:
            delattr(model, name)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._drawing, before, start = 0.0, self.watching, time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        seconds = time.perf_counter() - start - (self.watching - before)
        self.figures["rollout_seconds"] = self._drawing
        self.figures["train_seconds"] = seconds - self._drawing
        return loss


class Stock(Timed):
    """TRL's trainer and its sampler, transformers' `generate`."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        own, drawn = self.accelerator.unwrap_model(self.model).generate, Drawn()

        def timed(**inputs: Any) -> torch.Tensor:
            start = time.perf_counter()
            found = own(**inputs, logits_processor=LogitsProcessorList([drawn]))
            self._drawing += time.perf_counter() - start - drawn.seconds
            self.watching += drawn.seconds
            drawn.add(found[:, -1:])
            return found

        completions = self._completions_by("generate", timed, *args, **kwargs)
        logps = torch.stack(drawn.columns, 1).tolist()
        return completions, [x[: len(ids)] for x, ids in zip(logps, completions, strict=True)]


class Batched(Timed):
    """TRL's trainer with transformers' continuous batching, `generate_batch`."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        own, logps = self.accelerator.unwrap_model(self.model).generate_batch, []

        def timed(*args: Any, **inputs: Any) -> dict[str, Any]:
            start = time.perf_counter()
            found = own(*args, **inputs)
            self._drawing += time.perf_counter() - start
            logps.extend(output.logprobs for output in found.values())
            return found

        return self._completions_by("generate_batch", timed, *args, **kwargs), logps


class Steps(TrainerCallback):
    """Collects the figures of every step in `columns`, and prints them."""

    def __init__(self, trainer: Any, name: str):
        self.trainer, self.name = trainer, name
        self.columns: dict[str, list] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        reset_peak()
        self.trainer.figures = {}
        self.trainer.watching = 0.0
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        watching = self.trainer.watching
        self.trainer.figures |= {
            "seconds": time.perf_counter() - self._wall - watching,
            "cpu_seconds": time.process_time() - self._cpu - watching,
            "memory_mb": resident(peak=True) / 1e6,
        }

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **_: Any) -> None:
        if "reward" not in logs:
            return
        row = self.trainer.figures | {n: logs[k] for n, k in LOGGED.items() if k in logs}
        for part in ("rollout_seconds", "train_seconds"):
            row[part] = row.get(part, logs.get(f"csd/{part}"))
        for name, value in row.items():
            self.columns.setdefault(name, []).append(round(value, DECIMALS.get(name, 8)))
        print(self.name, state.global_step, row, flush=True)


# a cache for the default settings' 32 prompts; by default it has half of the memory
CACHE = {"num_blocks": 64, "max_batch_tokens": 4096}
# classes of trainers, and their settings
SIDES: dict[str, tuple[Any, dict[str, Any]]] = {
    "csd": (Csd, {}),
    "trl": (Stock, {}),
    "trl_batch": (
        Batched,
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"return_logprobs": True} | CACHE,
        },
    ),
}


def final(example: dict[str, Any], trainer: Any, train: int, count: int) -> dict[str, Any]:
    """Rewards of the trained model, of one answer to each of `count` problems after `train`."""
    every = example["problems"](train + count)
    trained = {row["prompt"] for row in example["problems"](train)}
    new = [row for row in every if row["prompt"] not in trained]
    answers = csd.generate(
        trainer.accelerator.unwrap_model(trainer.model).eval(),
        [row["prompt"] for row in new],
        tokenizer=trainer.processing_class,
        max_new_tokens=trainer.max_completion_length,
        num_samples=1,
        seed=0,
        temperature=1.0,
    )
    texts, right = [x.texts[0] for x in answers], [row["right"] for row in new]
    rewards = {"reward": "in_place", "solved": "solved"}
    means = {n: statistics.mean(example[f](texts, right)) for n, f in rewards.items()}
    return {"problems": count} | {n: round(mean, 4) for n, mean in means.items()}


def run(
    side: str, seed: int, settings: dict[str, Any], model: Any = None, problems: int = 500
) -> dict[str, Any]:
    """Train once; returns the run with a list of each figure by step.

    settings: of the example's `trainer_of`, and "packed", the name of a GGUF file that takes the
    place of SmolLM2. model: a model and its tokenizer, in place of both. problems: of `final`.
    Seconds are of the wall, without those of watching; memory is the resident set's peak in a step.
    """
    example = runpy.run_path(str(EXAMPLE))
    load = [round(x, 2) for x in os.getloadavg()]
    trainer, more = SIDES[side]
    settings = dict(settings)
    if packed := settings.pop("packed", None):
        path, dtype = path_of(packed), None if side == "csd" else torch.float32
        model = gguf_module(path, dtype=dtype), tokenizer_of(path)
    trainer = example["trainer_of"](seed=seed, trainer=trainer, model=model, **settings, **more)
    steps = Steps(trainer, f"{side}, seed {seed}, step")
    trainer.add_callback(steps)
    trainer.train()
    head = {"side": side, "seed": seed, "load": load, "machine": machine()}
    if problems:
        train = settings["steps"] * settings["prompts"]
        head["final"] = final(example, trainer, train, problems)
    return head | {"steps": steps.columns}
