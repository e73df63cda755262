"""GRPO whose groups end early: of a prompt that is solved only half of the samples are drawn.

    GRPOTrainer(..., rollout_func=Rollout(until="all_correct"))

needs `pip install 'trl>=1.16'`. A group of 8 is drawn in two parts. Where samples 0 to 3 all
have the full reward, the advantage of the group is zero, and the other 4 are not drawn. A twentieth
of such groups is drawn to its end all the same: how many of these have a wrong sample says what is
lost. A toy model learns to begin with a vowel, and its groups end early as it does. For a real run,
put a model, a dataset and a reward of your own in their places.
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from csd.integrations.trl import Rollout
from csd.models.demo import toy

PROMPTS = ["Write vowels: ", "Sing: ", "Say it with vowels only. ", "aeiou"]


def begins_with_a_vowel(completions: list[str], **_: object) -> list[float]:
    """Reward: 1 where the first character is a vowel."""
    return [float(text[:1] in tuple("aeiouAEIOU")) for text in completions]


def main(
    steps: int = 30,
    tokens: int = 8,
    rollout: Any = None,
    reward: Callable = begins_with_a_vowel,
    model: Any = None,
    **config: Any,
) -> GRPOTrainer:
    """config: of GRPOConfig, in place of the example's."""
    found, tokenizer = toy()
    rollout = rollout or Rollout(until="all_correct")
    settings: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=32,
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
        model=model or found,
        reward_funcs=reward,
        args=GRPOConfig(**settings | config),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = [row for row in trainer.state.log_history if "groups/mean_size" in row]
    for row in log[:: max(1, len(log) // 8)]:
        print(
            f"step {row['step']:3}: reward {row['reward']:.2f}, "
            f"{row['groups/mean_size']:.1f} of 8 samples a group drawn"
        )
    if rollout.ends is not None:
        print(f"{rollout.ends.mixed} of {rollout.ends.audited} audited groups had a wrong sample")
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=8)
    main(**vars(parser.parse_args()))
