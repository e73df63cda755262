"""One process of a two-process GRPO run: python grpo_rank.py FOLDER, under torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
from examples_main import main_of

from csd.integrations.trl import Rollout


class Recorded(Rollout):
    """Keeps what each call drew, with the seed it drew from."""

    def __init__(self):
        super().__init__(history=1)
        self.drawn = []

    def _seed(self, trainer):
        self.seed = super()._seed(trainer)
        return self.seed

    def __call__(self, prompts, trainer):
        out = super().__call__(prompts, trainer)
        self.drawn.append(dict(out, seed=self.seed))
        return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    rollout = Recorded()
    trainer = main_of("grpo.py")(steps=2, tokens=12, rollout=rollout, batch=4)
    weight = next(iter(trainer.model.parameters())).double().sum().item()
    prompt = rollout.drawn[-1]["prompt_ids"][0]
    history = prompt, [e.tokens.tolist() for e in rollout.history.of(prompt)]
    row = {"history": history, "world": trainer.accelerator.num_processes, "drawn": rollout.drawn,
           "weight": weight}  # fmt: skip
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(row))
