"""Grammar for the text after a sample's thought, with the methods of the grammar's matcher."""

from copy import copy
from typing import Any

import numpy as np

from csd.engine.thinking_budget import Budget
from csd.engine.thought_tags import Search, split


class Thinking:
    """Matcher that leaves a thought unconstrained and applies the grammar to the text after it.

    A sample has at most one thought: the one that its prompt left open, or one that it begins with.
    A sample may also begin with its text, without a thought.

    A token may end the thought and go on: the grammar applies to the rest of it.

    fresh: matcher in its initial state. budget: of the sample, with once=True. vocab: number of
    logits. tokens: `csd.engine.thought_tags.by_bytes`, for the rest of a token. banned: by state of
    the search for the end tag, tokens that end it and go on as no text does; filled when they are
    needed, for all samples with the same grammar and tags.
    """

    def __init__(
        self,
        fresh: Any,
        budget: Budget,
        vocab: int,
        tokens: dict[bytes, int],
        banned: dict[int, list[int]],
    ):
        self._fresh, self._budget, self._vocab = fresh, budget, vocab
        self._tokens, self._banned = tokens, banned
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
                if token not in budget.openings():
                    return False
                self._text = None
            else:
                text.consume_token(token)
        budget.push(token)
        if budget.open:
            self._text = None
        elif budget.rest is not None:
            self._text = self._after(*budget.rest)
            return self._text is not None
        return True

    def _after(self, token: int, symbols: int) -> Any:
        """Matcher of the text that begins after the first symbols of a token; None if none can."""
        text = self._fresh.deep_copy()
        rest = self._budget.end.symbols(token)[symbols:]
        if isinstance(rest, bytes) and rest:
            parts = split(rest, self._tokens)
            if not parts or not text.consume_tokens(parts):
                return None
        return text

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
        budget, forced = self._budget, self.forced()
        if budget.open and forced < 0:
            bits = np.full(size, 255, np.uint8)
            for token in self._unfit():
                bits[token // 8] &= 255 - (1 << token % 8)
            return bits.tobytes()
        bits = np.zeros(size, np.uint8)
        if self._text is not None:
            given = np.frombuffer(self._text.compute_bitmask(), np.uint8)[:size]
            bits[: len(given)] = given
        for token in [forced] if forced >= 0 else budget.openings():
            if forced >= 0 or self._fits(token):
                bits[token // 8] |= 1 << token % 8
        return bits.tobytes()

    def _fits(self, token: int) -> bool:
        """True if a token that continues the begin tag can be followed by a text or a thought."""
        walk = self._budget.copy()
        walk.push(token)
        return walk.rest is None or self._after(*walk.rest) is not None

    def _unfit(self) -> list[int]:
        state = self._budget.state
        if state not in self._banned:
            ending = ((t, self._ended_at(t)) for t in self._budget.candidates())
            self._banned[state] = [t for t, at in ending if self._after(t, at) is None]
        return self._banned[state]

    def _ended_at(self, token: int) -> int:
        return Search(self._budget.end, self._budget.state).push(token)

    def compute_ff_tokens(self) -> list[int]:
        if self._text is None:
            return self._budget.only()
        return self._text.compute_ff_tokens() if self._budget.over else []
