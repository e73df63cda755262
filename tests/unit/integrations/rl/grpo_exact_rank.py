"""A process of csd's GRPOTrainer: python grpo_exact_rank.py FOLDER, under torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
from helpers.examples_main import main_of

from csd.integrations.trl import GRPOTrainer, Rollout

RANK = os.environ["RANK"]


class Truncated(Rollout):
    """All completions of the process of rank 1 are truncated, and none of the other's."""

    def __call__(self, prompts, trainer):
        out = super().__call__(prompts, trainer)
        for ids in out["completion_ids"]:
            ids[-1] = trainer.processing_class.eos_token_id + int(RANK)
        return out


def train(rollout=Rollout, **config):
    config |= dict(optim="sgd", learning_rate=0.1, gradient_accumulation_steps=2)
    trainer = main(tokens=12, rollout=rollout(budget=16, exact=True), batch=4, **config)
    model = trainer.accelerator.unwrap_model(trainer.model)
    log = [row for row in trainer.state.log_history if "loss" in row]
    return trainer, log, {name: p.double().sum().item() for name, p in model.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main = main_of("grpo/grpo.py")
    main.__globals__["GRPOTrainer"] = GRPOTrainer
    trainer, log, weights = train(steps=2)
    _, log_of_truncated, after = train(Truncated, steps=1, mask_truncated_completions=True)
    row = {
        "world": trainer.accelerator.num_processes,
        "logged": [row["csd/logp_diff_max"] for row in log],
        "weights": weights,
        "truncated": after,
        "norm": log_of_truncated[0]["grad_norm"],
        "rows": log_of_truncated[0]["csd/rows"],
    }
    Path(sys.argv[1], f"{RANK}.json").write_text(json.dumps(row))
