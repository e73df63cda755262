"""Grammar for the text after a sample's thought, with the methods of the grammar's matcher."""

from copy import copy
from typing import Any

import numpy as np

from csd.engine.thinking_budget import Budget


class Thinking:
    """Matcher that leaves a thought unconstrained and applies the grammar to the text after it.

    A sample has at most one thought: the one that its prompt left open, or one that it begins with.
    A sample may also begin with its text, without a thought.

    fresh: matcher in its initial state. budget: of the sample, with once=True. vocab: number of
    logits.
    """

    def __init__(self, fresh: Any, budget: Budget, vocab: int):
        self._fresh, self._budget, self._vocab = fresh, budget, vocab
        # matcher of the text; None inside a thought, and where only a thought may begin
        self._text = None if budget.open else fresh.deep_copy()

    def deep_copy(self) -> "Thinking":
        found = copy(self)
        found._budget = self._budget.copy()
        found._text = None if self._text is None else self._text.deep_copy()
        return found

    def consume_token(self, token: int) -> bool:
        budget, text = self._budget, self._text
        if not budget.open:
            if text is None or text.validate_tokens([token]) != 1:
                if token != budget.opening():
                    return False
                self._text = None
            else:
                text.consume_token(token)
        budget.push(token)
        if budget.open:
            self._text = None
        elif self._text is None and budget.over:
            self._text = self._fresh.deep_copy()
        return True

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all([self.consume_token(token) for token in tokens])

    def forced(self) -> int:
        """The only token that may come next, or -1 if the budget does not force one."""
        return self._budget.forced()

    def is_error(self) -> bool:
        return self._text is not None and self._text.is_error()

    def is_accepting(self) -> bool:
        """True if an end token may come next, also inside a thought whose budget is not spent."""
        if self._budget.open:
            return self.forced() < 0
        return self._text is not None and self._text.is_accepting()

    def compute_bitmask(self) -> bytes:
        size = (self._vocab + 7) // 8
        if self._budget.open and self.forced() < 0:
            return b"\xff" * size
        bits = np.zeros(size, np.uint8)
        if self._text is not None:
            given = np.frombuffer(self._text.compute_bitmask(), np.uint8)[:size]
            bits[: len(given)] = given
        for token in (self.forced(), self._budget.opening()):
            if token >= 0:
                bits[token // 8] |= 1 << token % 8
        return bits.tobytes()

    def compute_ff_tokens(self) -> list[int]:
        if self._text is None:
            return self._budget.only()
        return self._text.compute_ff_tokens() if self._budget.over else []
