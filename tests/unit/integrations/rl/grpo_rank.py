"""One process of a two-process GRPO run: python grpo_rank.py FOLDER, under torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
from helpers.examples_main import main_of

from csd.integrations.trl import Rollout


class Recorded(Rollout):
    """Keeps what each call drew, with the seed it drew from."""

    def __init__(self, **options):
        super().__init__(history=1, **options)
        self.drawn = []

    def _seed(self, trainer):
        self.seed = super()._seed(trainer)
        return self.seed

    def __call__(self, prompts, trainer):
        out = super().__call__(prompts, trainer)
        self.drawn.append(dict(out, seed=self.seed))
        return out


def early_ends():
    """Steps whose groups, shared by both processes, may end with their first 5 samples."""

    def rate(completions, prompts, **_):
        return [
            1.0 if prompt != "Sing: " else float(len(text) % 2)
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    rollout, sizes = Recorded(until="all_correct", first=5, audit=0.0), []

    def drawn(prompts, trainer):
        found = rollout(prompts, trainer)
        sizes.append((prompts[0], sum(map(any, found["env_mask"]))))
        return found

    drawn.ends = rollout.ends
    trainer = main_of("grpo/grpo_early_ends.py")(
        steps=4, tokens=6, rollout=drawn, reward=rate, per_device_train_batch_size=4
    )
    logged = [row["groups/mean_size"] for row in trainer.state.log_history if "reward" in row]
    prompt = rollout.drawn[-1]["prompt_ids"][0]
    return {
        "sizes": sizes,
        "logged": logged,
        "seeds": [d["seed"] for d in rollout.drawn],
        "completions": [d["completion_ids"] for d in rollout.drawn],
        "history": [e.tokens.tolist() for e in rollout.history.of(prompt)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rollout = Recorded()
    trainer = main_of("grpo/grpo.py")(steps=2, tokens=12, rollout=rollout, batch=4)
    weight = next(iter(trainer.model.parameters())).double().sum().item()
    prompt = rollout.drawn[-1]["prompt_ids"][0]
    history = prompt, [e.tokens.tolist() for e in rollout.history.of(prompt)]
    row = {
        "history": history,
        "world": trainer.accelerator.num_processes,
        "drawn": rollout.drawn,
        "weight": weight,
        "early": early_ends(),
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(row))
