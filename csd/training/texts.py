"""Texts to train on: prompts with recorded samples, split by prompt, in batches."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from csd.traces.traces import read_traces
from csd.utils.check import shown


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt followed by one sample of it."""

    tokens: list[int]
    start: int  # index of the sample's first token

    @property
    def learnt(self) -> range:
        """Positions i of tokens t[i] from which a token t[i + 1] of the sample is predicted.

        Position 0 is left out: it has no state before it.
        """
        return range(max(self.start - 1, 1), len(self.tokens) - 1)


def read_texts(paths: Iterable[str | Path], vocab: int, longest: int) -> list[list[Text]]:
    """Read the texts of trace files, one list per prompt, each text cut at `longest` tokens.

    Texts without a token to predict are left out. Raises ValueError, naming the file, for a line
    that is not a trace and for tokens outside the vocabulary.
    """
    by_prompt: dict[tuple[int, ...], list[Text]] = {}
    for path in paths:
        for trace in read_traces(path):
            prompt = trace.prompt
            for sample in trace.samples:
                tokens = [*prompt, *sample]
                if max(tokens) >= vocab:
                    raise ValueError(
                        f"traces must have tokens in the model's vocabulary of {vocab}, got "
                        f"{max(tokens)} in {path}"
                    )
                text = Text(tokens[:longest], len(prompt))
                if text.learnt:
                    by_prompt.setdefault(tuple(prompt), []).append(text)
    return [*by_prompt.values()]


def split(prompts: list[list[Text]], held_out: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Split into texts to train on and held-out texts, a share of the prompts, at least one.

    All samples of a prompt are on one side. Raises ValueError if no prompt would be left to train
    on. held_out: 0 holds out none.
    """
    count = max(1, round(held_out * len(prompts))) if held_out else 0
    if len(prompts) <= count:
        raise ValueError(
            f"traces must have more prompts than are held out, got {len(prompts)} prompts with "
            f"samples and held_out={shown(held_out)}"
        )
    chosen = set(random.Random(f"held out {seed}").sample(range(len(prompts)), count))
    parts: tuple[list[Text], list[Text]] = [], []
    for i, texts in enumerate(prompts):
        parts[i in chosen].extend(texts)
    return parts


def batches(
    texts: list[Text], max_tokens: int, order: random.Random | None = None
) -> list[list[Text]]:
    """Divide texts into batches of at most `max_tokens` tokens; a longer text is its own batch.

    order: shuffles the texts.
    """
    numbers = [*range(len(texts))]
    if order is not None:
        order.shuffle(numbers)
    batch_list: list[list[Text]] = []
    room = 0
    for i in numbers:
        size = len(texts[i].tokens)
        if size > room:
            batch_list.append([])
            room = max_tokens
        batch_list[-1].append(texts[i])
        room -= size
    return batch_list


def digest(prompts: list[list[Text]]) -> str:
    """Digest of the texts' contents: 16 hexadecimal digits."""
    parts = hashlib.sha256()
    for texts in prompts:
        for text in texts:
            row = torch.tensor([text.start, *text.tokens], dtype=torch.int64)
            parts.update(row.numpy().tobytes())
    return parts.hexdigest()[:16]
