"""Texts to train on: recorded samples behind their prompts, split by prompt, in batches."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from csd.engine.traces.traces import read_traces
from csd.schema.check import shown


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and one sample of it."""

    tokens: list[int]
    start: int  # of the sample

    @property
    def learnt(self) -> range:
        """Places i of token t[i], of which token t[i + 1] of the sample is predicted.

        Place 0 has no state before it.
        """
        return range(max(self.start - 1, 1), len(self.tokens) - 1)


def read_texts(paths: Iterable[str | Path], vocab: int, longest: int) -> list[list[Text]]:
    """The texts of each prompt of trace files, cut at `longest` tokens.

    Prompts without a token to predict are left out. Raises ValueError, which names the file, for
    what is no trace and for tokens outside of the vocabulary.
    """
    found: dict[tuple[int, ...], list[Text]] = {}
    for path in paths:
        for trace in read_traces(path):
            prompt = trace.prompt
            for sample in trace.samples:
                tokens = [*prompt, *sample]
                if max(tokens) >= vocab:
                    raise ValueError(
                        f"traces must hold tokens of the model's vocabulary of {vocab}, got "
                        f"{max(tokens)} in {path}"
                    )
                text = Text(tokens[:longest], len(prompt))
                if text.learnt:
                    found.setdefault(tuple(prompt), []).append(text)
    return [*found.values()]


def split(prompts: list[list[Text]], held_out: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and those of a share of the prompts, at least one, that are held out.

    All samples of a prompt are on one side. Raises ValueError where none would be left to train on.
    """
    count = max(1, round(held_out * len(prompts))) if held_out else 0
    if len(prompts) <= count:
        raise ValueError(
            f"traces must hold more prompts than are held out, got {len(prompts)} with samples "
            f"and held_out={shown(held_out)}"
        )
    chosen = set(random.Random(f"held out {seed}").sample(range(len(prompts)), count))
    parts: tuple[list[Text], list[Text]] = [], []
    for i, texts in enumerate(prompts):
        parts[i in chosen].extend(texts)
    return parts


def batches(texts: list[Text], most: int, order: random.Random | None = None) -> list[list[Text]]:
    """Each text in one batch of at most `most` tokens; a longer one is alone in its own."""
    numbers = [*range(len(texts))]
    if order is not None:
        order.shuffle(numbers)
    found: list[list[Text]] = []
    room = 0
    for i in numbers:
        size = len(texts[i].tokens)
        if size > room:
            found.append([])
            room = most
        found[-1].append(texts[i])
        room -= size
    return found


def digest(prompts: list[list[Text]]) -> str:
    """A name of the texts by what is in them."""
    parts = hashlib.sha256()
    for texts in prompts:
        for text in texts:
            row = torch.tensor([text.start, *text.tokens], dtype=torch.int64)
            parts.update(row.numpy().tobytes())
    return parts.hexdigest()[:16]
