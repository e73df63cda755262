"""A process of csd's GRPOTrainer: python grpo_exact_rank.py FOLDER, under torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
from helpers.examples_main import main_of

from csd.integrations.trl import GRPOTrainer, Rollout

if __name__ == "__main__":
    torch.set_num_threads(1)
    main = main_of("grpo/grpo.py")
    main.__globals__["GRPOTrainer"] = GRPOTrainer
    rollout = Rollout(budget=16, exact=True)
    config = dict(optim="sgd", learning_rate=0.1, gradient_accumulation_steps=2)
    trainer = main(steps=2, tokens=12, rollout=rollout, batch=4, **config)
    model = trainer.accelerator.unwrap_model(trainer.model)
    log = [row for row in trainer.state.log_history if "loss" in row]
    row = {
        "world": trainer.accelerator.num_processes,
        "logged": [row["csd/logp_diff_max"] for row in log],
        "weights": {name: p.double().sum().item() for name, p in model.named_parameters()},
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(row))
