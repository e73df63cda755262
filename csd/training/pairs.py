"""Pairs that a head reads of a batch of texts, and the chains that begin at them."""

from itertools import accumulate
from typing import Any

import torch

from csd.training.texts import Text


class Pairs:
    """Tokens t[i] with the target's states before them, texts one behind the other.

    Token 0 of a text has no state before it, and after the last one nothing is learnt. A pair is
    learnt where the token that follows it is the sample's.
    """

    def __init__(self, texts: list[Text], device: torch.device):
        whole = [len(text.tokens) for text in texts]
        begin = [0, *accumulate(whole)]  # of texts, in the batch
        self.lengths = [n - 2 for n in whole]  # pairs of each text
        self._first = [0, *accumulate(self.lengths)]  # of texts, among the pairs
        at = [a + i for a, n in zip(begin, whole, strict=False) for i in range(1, n - 1)]
        place = [a + i for a, text in zip(begin, texts, strict=False) for i in text.learnt]
        self._learnt = [
            range(f + text.learnt.start - 1, f + n)
            for f, n, text in zip(self._first, self.lengths, texts, strict=False)
        ]
        made: dict[str, Any] = dict(device=device)
        # tokens of the batch [M]; the pairs' [P] and the learnt pairs' [R] places among them
        self.token = torch.tensor([t for text in texts for t in text.tokens], **made)
        self.at, self.place = torch.tensor(at, **made), torch.tensor(place, **made)
        # learnt pairs [R] among the pairs, and places of the pairs [P] in their texts, from 0
        self.rows = torch.tensor([r for x in self._learnt for r in x], **made)
        self.position = torch.cat([torch.arange(n, **made) for n in self.lengths])

    def chains(self, step: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Chains with a `step`-th token after their pair, whose next token is learnt as well.

        Returns their pairs as numbers among the learnt ones, and of each text that has some
        (first pair of the text, first pair of a chain, end), among all pairs.
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
