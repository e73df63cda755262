"""GRPO with csd drawing the rollouts: a toy model learns to write vowels.

    GRPOTrainer(..., rollout_func=Rollout())

needs `pip install 'trl>=1.16'`. A step draws 8 completions of each of 4 prompts; csd keeps the 8
copies of a prompt in one group, and reads the trainer's own weights, so nothing is synchronised.
On several processes (`accelerate launch --num_processes 2 examples/grpo/grpo.py`) the copies are
shared out, and each sample is still drawn once. Samples of a random model have nothing in common,
so nothing is drafted and tau is 1.00. For a real run, put a model and a dataset of your own in
their places.
"""

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from csd.integrations.trl import Rollout
from csd.models.demo import toy

PROMPTS = ["Write vowels: ", "Sing: ", "Say it with vowels only. ", "aeiou"]


def vowels(completions: list[str], **_: object) -> list[float]:
    """Reward: the share of vowels."""
    return [sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1) for text in completions]


def main(
    steps: int = 20, tokens: int = 24, rollout: Any = None, batch: int = 32, **config: Any
) -> GRPOTrainer:
    """config: of GRPOConfig, in place of the example's."""
    model, tokenizer = toy()
    settings: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=batch,
        max_completion_length=tokens,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=GRPOConfig(**settings | config),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        rollout_func=rollout or Rollout(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    for row in log[:: max(1, len(log) // 8)]:
        print(
            f"step {row['step']:3}: loss {row['loss']:7.4f}, share of vowels {row['reward']:.3f}, "
            f"{row['csd/tau']:.2f} tokens per step of a sample, "
            f"{row['csd/tokens_per_second']:.0f} tokens per second"
        )
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24)
    main(**vars(parser.parse_args()))
