"""A process of csd's GRPOTrainer: python grpo_exact_rank.py FOLDER [FILE], under torchrun.

FILE: a GGUF file beside which an adapter is trained.
"""

import json
import os
import sys
from pathlib import Path

import torch
from helpers.examples_main import main_of

from csd.integrations.trl import GRPOTrainer, Rollout

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *file = sys.argv[1:]
    main = main_of("grpo/grpo_lora.py" if file else "grpo/grpo.py")
    main.__globals__["GRPOTrainer"] = GRPOTrainer
    rollout = Rollout(budget=16, exact=True)
    config = dict(optim="sgd", learning_rate=0.1, gradient_accumulation_steps=2)
    if file:
        model = file[0], main.__globals__["toy_llama"]()[1]
        main.__globals__["toy_llama"] = lambda: model
        config["disable_dropout"] = True
    trainer = main(steps=2, tokens=12, rollout=rollout, batch=4, **config)
    model = trainer.accelerator.unwrap_model(trainer.model)
    log = [row for row in trainer.state.log_history if "loss" in row]
    row = {
        "world": trainer.accelerator.num_processes,
        "logged": [row["csd/logp_diff_max"] for row in log],
        "weights": {
            name: p.double().sum().item() for name, p in model.named_parameters() if p.requires_grad
        },
    }
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(row))
