"""GRPO with a tool and csd's rollouts: a toy model learns to call it with large digits.

    GRPOTrainer(..., tools=[square])       # csd.integrations.trl.GRPOTrainer, with TRL's `tools`
    GRPOTrainer(..., environment_factory=Squares)     # or a class whose methods are the tools

A turn of the toy model ends at a digit, which calls the tool, or at its end token. csd draws every
turn, in a session: a sample's later turns read only what is new, and draft from the other samples.
Tokens of the tool have no loss. A chat model calls tools by its chat template's own format, so the
three lines with `parse_response` and the generation's ends are for the toy alone.
"""

import tempfile
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from csd.integrations.trl import GRPOTrainer, Rollout
from csd.models.demo import toy

PROMPTS = ["Which square? ", "Square a digit: "]


def square(digit: int) -> int:
    """Square of a digit.

    Args:
        digit: from 0 to 9.
    """
    return digit * digit


def parsed(ids: list[int], text: str) -> dict[str, Any]:
    call = {"name": "square", "arguments": {"digit": int(text[-1])}} if text[-1].isdigit() else None
    calls = [{"type": "function", "function": call}] if call else []
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def largest(completions: list[list[dict]], **_: object) -> list[float]:
    """Reward: the largest answer of the tool, 1 for 81."""
    answers = [[int(m["content"]) for m in c if m["role"] == "tool"] for c in completions]
    return [max(own, default=0) / 81 for own in answers]


def main(
    steps: int = 20, rollout: Any = None, environment: Any = None, **config: Any
) -> GRPOTrainer:
    """environment: class with the tools, in place of `square`. config: of GRPOConfig, in place of
    the example's."""
    model, tokenizer = toy()
    tokenizer.response_template = {}
    tokenizer.parse_response = lambda ids, **_: parsed(ids, tokenizer.decode(ids))
    ends = [1, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    settings: dict[str, Any] = dict(output_dir=tempfile.mkdtemp(), max_steps=steps, report_to=[])
    settings |= dict(num_generations=8, per_device_train_batch_size=16, max_completion_length=64)
    settings |= dict(max_tool_calling_iterations=2, generation_kwargs={"eos_token_id": ends})
    settings |= dict(learning_rate=3e-3, logging_steps=1, save_strategy="no", use_cpu=True)
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in PROMPTS]})
    trainer = GRPOTrainer(
        model, largest, GRPOConfig(**settings | config), data, processing_class=tokenizer,
        tools=None if environment else [square], environment_factory=environment,
        rollout_func=rollout or Rollout(),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
