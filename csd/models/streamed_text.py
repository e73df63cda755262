"""Text of a growing list of tokens, and the place where a stop string ends it."""

from bisect import bisect_left, bisect_right
from typing import Any


class TextStream:
    """Decodes token by token.

    Only the tail is decoded again: a token may join with the one before it, and one character may
    take several tokens, so text is held back while it ends in an incomplete character.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._start = 0  # the tail's first token
        self._read = 0  # tokens whose text is certain
        self.text = ""
        self.ends: list[int] = []  # length of the certain text after each token

    def push(self, token: int) -> str:
        """Add a token; returns the text that became certain."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        added = ""
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._start, self._read = self._read, len(self._tokens)
            added = after[len(before) :]
        self.text += added
        self.ends.append(len(self.text))
        return added

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, across their borders."""

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._longest = max(map(len, stop))

    def find(self, text: str, added: int) -> tuple[int, str] | None:
        """(start, string) of the first stop string that ends in the last `added` characters."""
        start = max(0, len(text) - added - self._longest + 1)
        found = [(at, len(s), s) for s in self._stop if (at := text.find(s, start)) >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def open(self, text: str) -> int:
        """Number of characters at the end of a text that may be the beginning of a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop if len(s) > n):
                return n
        return 0


class SampleText:
    """Text of a sample while it is drawn: the shown text, and the stop string that ended it.

    Stop strings are searched for in the text with special tokens. The shown text, with special
    tokens or without, is cut at the same token.

    streams: whether `take` is called while tokens arrive.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        *,
        include_stop: bool,
        skip_special_tokens: bool,
        streams: bool,
    ):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._include_stop = include_stop
        self._stop = StopStrings(stop) if stop else None
        self._tokens: list[int] = []
        # text with special tokens, in which stop strings are searched for
        self._full = TextStream(tokenizer, skip_special_tokens=False) if stop else None
        self._shown = TextStream(tokenizer, skip_special_tokens) if streams else None
        self._taken = 0  # number of characters that `take` has returned
        self._cut: int | None = None  # end of the sample in the full text
        self.stop_string: str | None = None  # the one that ended the sample

    def push(self, token: int) -> bool:
        """Add a token; True if it completes a stop string."""
        self._tokens.append(token)
        if self._shown is not None:
            self._shown.push(token)
        if self._full is None or self._stop is None:
            return False
        added = self._full.push(token)
        found = self._stop.find(self._full.text, len(added)) if added else None
        if found is None:
            return False
        start, self.stop_string = found
        self._cut = start + len(self.stop_string) if self._include_stop else start
        return True

    def take(self) -> str:
        """The shown text that became certain since the last call."""
        if self._shown is None:
            return ""
        end = len(self._shown.text)
        if self._full is not None and self._stop is not None:
            # a token that is held back in either stream is certain in neither
            held = self._stop.open(self._full.text)
            end = min(end, self._place(len(self._full.text) - held, certain=True))
        return self._upto(self._shown.text[:end])

    def keep(self, count: int) -> None:
        """Leave out the tokens after the first `count` in the result of `finish`."""
        del self._tokens[count:]

    def finish(self, by_token: bool) -> tuple[str, str]:
        """The whole shown text, and its part that `take` has not returned yet.

        by_token: whether an end token, which is the last token, ended the sample.
        """
        if self._cut is not None:
            text = self._final(self._tokens)[: self._place(self._cut)]
        elif by_token and not self._include_stop:
            text = self._final(self._tokens[:-1])
        else:
            text = self._final(self._tokens)
        return text, self._upto(text)

    def _final(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)

    def _upto(self, text: str) -> str:
        added = text[self._taken :]
        self._taken = max(self._taken, len(text))
        return added

    def _place(self, at: int, certain: bool = False) -> int:
        """Index in the shown text, or in its certain part, of index `at` in the full text.

        `at` lies in the text of one token, or of several that make up a character. The index is
        counted from that text's end, since a decoder may strip the space before the first shown
        token.
        """
        assert self._full is not None
        ends = self._full.ends
        i = bisect_right(ends, at)  # the first token whose text ends after `at`
        base = ends[i - 1] if i else 0
        first = bisect_left(ends, base) + 1 if base else 0
        low = self._length(first, certain)
        if i == len(ends):
            return low
        high = self._length(i + 1, certain)
        return min(max(high - (ends[i] - at), low), high)

    def _length(self, count: int, certain: bool) -> int:
        """Length of the shown text of the first `count` tokens."""
        if certain and self._shown is not None:
            return self._shown.ends[count - 1] if count else 0
        return len(self._final(self._tokens[:count]))
