"""GRPO that trains a LoRA adapter, with csd drawing the rollouts from the model as it is.

    GRPOTrainer(..., peft_config=LoraConfig(...), rollout_func=Rollout())

needs `pip install 'trl>=1.16' 'peft>=0.18'`. csd runs the module with its adapter unmerged: the
log-probabilities of a rollout are those of the trainer's own forward, and each optimiser step is in
the next rollout. A toy Llama learns to write vowels while its own weights stay as they are. For a
real run, put a model and a dataset of your own in their places.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from csd.integrations.trl import Rollout
from csd.models.demo import toy

PROMPTS = ["Write vowels: ", "Sing: ", "Say it with vowels only. ", "aeiou"]


def vowels(completions: list[str], **_: object) -> list[float]:
    """Reward: the share of vowels."""
    return [sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1) for text in completions]


def toy_llama() -> tuple[Any, Any]:
    """A Llama with random weights, and the toy's tokenizer of one character a token."""
    _, tokenizer = toy()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.2)
    return model, tokenizer


def main(
    steps: int = 20, tokens: int = 24, rollout: Any = None, batch: int = 32, **config: Any
) -> GRPOTrainer:
    """config: of GRPOConfig, in place of the example's."""
    model, tokenizer = toy_llama()
    settings: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=batch,
        max_completion_length=tokens,
        learning_rate=1e-2,
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
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.05),
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
