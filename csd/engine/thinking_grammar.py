"""A grammar of what follows a sample's thought, with the matcher's own methods."""

from typing import Any

import numpy as np

from csd.engine.thought import Budget


class Thinking:
    """Leaves a thought free and reads what is behind it.

    A sample has one thought at most: the one that its prompt left open, or one that it begins with.
    Where it has not begun with anything else, its text may begin too.

    fresh: a matcher that has read nothing. budget: of a sample of this kind. vocab: of the logits.
    """

    def __init__(self, fresh: Any, budget: Budget, vocab: int):
        self._budget, self._vocab = budget, vocab
        self._behind = fresh.deep_copy()
        # what reads the text; None within a thought, and where only one may begin
        self._text = None if budget.open else fresh.deep_copy()
        # of each token: what read the text before it, and what read the token
        self._log: list[tuple[Any, Any]] = []

    def consume_token(self, token: int) -> bool:
        budget, before, reader = self._budget, self._text, None
        if not budget.open:
            reader = before if before is not None and before.validate_tokens([token]) else None
            if reader is None and token != budget.opening():
                return False
        budget.push(token)
        if reader is not None:
            reader.consume_token(token)
        self._text = None if budget.open else reader
        if before is None and budget.over:
            self._text = self._behind
        self._log.append((before, reader))
        return True

    def consume_tokens(self, tokens: list[int]) -> None:
        for token in tokens:
            self.consume_token(token)

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self._text, reader = self._log.pop()
            if reader is not None:
                reader.rollback(1)
            self._budget.pop()

    def forced(self) -> int:
        """The only token that may come next, -1 where the budget does not force one."""
        return self._budget.forced()

    def is_accepting(self) -> bool:
        """Whether an end token may come next: it may within a thought that is not forced to end."""
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
