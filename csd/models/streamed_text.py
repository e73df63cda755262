"""Text of a growing list of tokens, and the place where a stop string ends it."""

from typing import Any


class TextStream:
    """Decodes token by token.

    Only the tail is decoded again: a token may join with the one before it, and one character may
    take several tokens, so text is held back while it ends in an incomplete character.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # the tail's first token
        self._read = 0  # tokens whose text has been given out
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token; returns the text that became certain."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        self.text += after[len(before) :]
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, across their borders."""

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._longest = max(map(len, stop))

    def find(self, text: str, added: int) -> int | None:
        """Where the text is cut, if a stop string ends within its last `added` characters."""
        start = max(0, len(text) - added - self._longest + 1)
        found = [at for at in (text.find(s, start) for s in self._stop) if at >= 0]
        return min(found) if found else None
