"""Texts to train on: prompts with recorded samples, in batches, and what a head reads from them.

An EAGLE-3 head has its own vocabulary: `draft_tokens` chooses its tokens, and `maps` has their maps
in the published format.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

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


class Pairs:
    """Pairs of a token t[i] and the target's state before it, for a batch of concatenated texts.

    Token 0 of a text has no state before it, and the last token has none to predict after it. A
    pair is learnt if the token after it belongs to the sample.
    """

    def __init__(self, texts: list[Text], device: torch.device):
        whole = [len(text.tokens) for text in texts]
        begin = [0, *accumulate(whole)]  # first token of each text in the batch
        self.lengths = [n - 2 for n in whole]  # pairs of each text
        self._first = [0, *accumulate(self.lengths)]  # first pair of each text
        index = [a + i for a, n in zip(begin, whole, strict=False) for i in range(1, n - 1)]
        learnt = [a + i for a, text in zip(begin, texts, strict=False) for i in text.learnt]
        self._learnt = [
            range(f + text.learnt.start - 1, f + n)
            for f, n, text in zip(self._first, self.lengths, texts, strict=False)
        ]
        made: dict[str, Any] = dict(device=device)
        # token [M]: tokens of the batch; at [P]: index in it of each pair, learnt_at [R]: of each
        # learnt pair
        self.token = torch.tensor([t for text in texts for t in text.tokens], **made)
        self.at, self.learnt_at = torch.tensor(index, **made), torch.tensor(learnt, **made)
        # rows [R]: indices of learnt pairs among the pairs; position [P]: of pairs in their texts
        self.rows = torch.tensor([r for x in self._learnt for r in x], **made)
        self.position = torch.cat([torch.arange(n, **made) for n in self.lengths])

    def chains(self, step: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Chains that have a `step`-th token after their pair and a token to predict after that.

        Returns indices of their pairs among the learnt pairs, and for each text with such chains
        (first pair of the text, pair of the first chain, end), indices among all pairs.
        """
        bases: list[int] = []
        spans, seen = [], 0
        for first, learnt in zip(self._first, self._learnt, strict=False):
            count = max(len(learnt) - step, 0)
            bases += range(seen, seen + count)
            if count:
                spans.append((first, learnt.start, learnt.start + count))
            seen += len(learnt)
        return bases, spans


# largest default size of a draft vocabulary, as in published heads
MAX_VOCAB = 32_000


def draft_tokens(
    texts: list[Text], vocab: int, size: int | None, device: torch.device
) -> torch.Tensor | None:
    """The `size` most frequent tokens of the texts' samples, ascending; None for all tokens.

    size: None means the whole vocabulary, or MAX_VOCAB tokens of a larger one. Equally frequent
    tokens rank by id, the lower first. Raises ValueError if size exceeds the vocabulary.
    """
    if size is not None and size > vocab:
        raise ValueError(
            f"draft_vocab must be at most the model's vocabulary of {vocab}, got {size}"
        )
    size = min(vocab, MAX_VOCAB) if size is None else size
    if size == vocab:
        return None
    counts = Counter(t for text in texts for t in text.tokens[text.start :])
    chosen = sorted(range(vocab), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(chosen), device=device)


def maps(token: torch.Tensor, vocab: int) -> dict[str, torch.Tensor]:
    """d2t [Vd] int64, the target's token id minus the head's, and t2d [V] bool, True for tokens
    in the head's vocabulary."""
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[token] = True
    return {"d2t": token - torch.arange(len(token)), "t2d": inside}
