"""A process that trains an adapter beside a GGUF file: grpo_packed_rank.py FOLDER FILE."""

import json
import os
import sys
from pathlib import Path

import torch
from helpers.examples_main import main_of

from csd.integrations.trl import GRPOTrainer, Rollout

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, file = sys.argv[1:]
    main = main_of("grpo/grpo_lora.py")
    tokenizer = main.__globals__["toy_llama"]()[1]
    main.__globals__.update(GRPOTrainer=GRPOTrainer, toy_llama=lambda: (file, tokenizer))
    trainer = main(steps=2, tokens=12, rollout=Rollout(), batch=4, disable_dropout=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    row = {
        "logged": [x["csd/logp_diff_max"] for x in trainer.state.log_history if "loss" in x],
        "weights": [x.double().sum().item() for x in model.parameters() if x.requires_grad],
    }
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(row))
