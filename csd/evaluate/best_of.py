"""Best-of-N: the sample with the highest score."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from csd.engine.results.result import Sample
from csd.evaluate.vote import drawn, mean_logprob, text_of
from csd.models.text.prompts import chat_ids
from csd.utils.check import shown


@dataclass(frozen=True, slots=True)
class Best:
    sample: Sample
    score: float
    scores: list[float]  # one per sample that was compared


def best_of(
    samples: Iterable[Sample],
    score: str | Callable[[Sample], float] | torch.nn.Module = "logprob",
    *,
    tokenizer: Any = None,
    prompt: str | list[dict] | None = None,
) -> Best:
    """The sample with the highest score, of those before the first cancelled one.

    samples: the `Samples` that `csd.generate` returns for a prompt, or a list of `Sample`.
    score: "logprob", the mean log-probability of a token; a function of a `Sample`; or a reward
        model: a `transformers` sequence classification model with one label.
    tokenizer: the reward model's tokenizer.
    prompt: text or messages before each answer, for the reward model. Messages go through the
        tokenizer's chat template, with the answer as the assistant's; a str is prepended unchanged.

    Ties go to the lowest index. Raises ValueError if no sample has finished, if a score is NaN, and
    for a reward model without tokenizer or prompt or with several labels.
    """
    compared = drawn(samples)
    if not compared:
        raise ValueError("samples must have at least one that was not cancelled, got none")
    if isinstance(score, str) and score == "logprob":
        score = mean_logprob
    elif isinstance(score, torch.nn.Module):
        score = _reward(score, tokenizer, prompt)
    elif not callable(score):
        raise ValueError(
            "score must be 'logprob', a function or a sequence classification model, got "
            f"{shown(score)}"
        )
    scores = [_number(score(s), s) for s in compared]
    best = max(range(len(scores)), key=scores.__getitem__)
    return Best(compared[best], scores[best], scores)


def _number(score: Any, sample: Sample) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(
            f"score must return a number, got {shown(score)} for sample {sample.index}"
        ) from error
    if math.isnan(value):
        raise ValueError(f"score must return a number, got NaN for sample {sample.index}")
    return value


def _reward(
    model: torch.nn.Module, tokenizer: Any, prompt: str | list[dict] | None
) -> Callable[[Sample], float]:
    if tokenizer is None:
        raise ValueError("score is a reward model, which needs tokenizer=, got None")
    if prompt is None:
        raise ValueError("score is a reward model, which needs prompt=, got None")
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if labels != 1:
        raise ValueError(f"score must be a model with num_labels=1, got {labels}")

    # one answer at a time: padding depends on the model, and drawing samples takes far longer
    @torch.inference_mode()
    def reward(sample: Sample) -> float:
        text = text_of(sample)
        if isinstance(prompt, str):
            ids = tokenizer(prompt + text)["input_ids"]
        else:
            chat = [*prompt, {"role": "assistant", "content": text}]
            ids = chat_ids(chat, tokenizer, "prompt", {"add_generation_prompt": False})
        device: Any = model.device
        batch = torch.tensor([ids], device=device)
        training = model.training
        model.eval()
        try:
            return model(batch, attention_mask=torch.ones_like(batch)).logits[0, 0].item()
        finally:
            model.train(training)

    return reward
