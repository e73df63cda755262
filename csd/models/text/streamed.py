"""Text of a growing list of tokens, and the place where a stop string ends it."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csd.models.text.context import TextContext, shared


@dataclass(slots=True)
class _Tail:
    """The last tokens of a text, which are decoded again with each further one."""

    tokens: list[int]
    read: int  # tokens whose text is certain
    before: str  # their text
    base: int  # length of the whole text up to them


class TextStream:
    """Decodes token by token behind a prompt.

    Only the tail is decoded again: a token may join with the one before it, and one character may
    take several tokens, so text is held back while it ends in an incomplete character.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
    ):
        self._context = context = TextContext(tokenizer, prompt, skip_special_tokens)
        self._tail = _Tail([*context.tokens], len(context.tokens), context.before, 0)
        # the tail in front of a run of bytes, which is decoded anew once the run has ended
        self._run: _Tail | None = None
        if context.tokens and not context.ends_run(context.tokens[-1]):
            self._open_run()
        self.text = ""
        self.settled = 0  # length of the text that no further token can change
        self.ends: list[int] = []  # length of the certain text after each token

    def push(self, token: int) -> str:
        """Add a token; returns the text that became certain."""
        if self._run is None and self._context.in_run(token):
            self._open_run()
        if self._run is not None:
            self._run.tokens.append(token)
        if self._run is not None and self._context.ends_run(token):
            self._tail, self._run = self._run, None
        else:
            self._tail.tokens.append(token)
        added = self._extend()
        if self._run is None:
            self.settled = max(self.settled, len(self.text) - self._context.open)
        self.ends.append(len(self.text))
        return added

    def _open_run(self) -> None:
        self._run = replace(self._tail, tokens=[*self._tail.tokens])

    def _extend(self) -> str:
        """Replace the tail's text by that of all its tokens; returns what is new in it."""
        tail, context = self._tail, self._context
        after = context.decode(tail.tokens)
        if after.endswith("\ufffd"):
            return ""
        same = shared(tail.before, after)
        start = max(tail.base - len(tail.before) + same, 0)
        replaced, new = self.text[start:], after[same:]
        changed = shared(replaced, new)
        self.text = self.text[:start] + new
        if changed < len(replaced):
            # the text of earlier tokens was changed
            first = bisect_right(self.ends, start + changed)
            self.ends[first:] = [start + changed] * (len(self.ends) - first)
        if len(new) > 2 * context.open:
            tokens = tail.tokens[tail.read :]
            self._tail = _Tail(tokens, len(tokens), context.decode(tokens), len(self.text))
        return new[changed:]


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, across their borders."""

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._longest = max(map(len, stop))

    def find(self, text: str, added: int, begin: int = 0) -> tuple[int, str] | None:
        """(start, string) of the first stop string behind `begin` that ends in the last `added`
        characters."""
        start = max(begin, len(text) - added - self._longest + 1)
        matches = [(index, len(s), s) for s in self._stop if (index := text.find(s, start)) >= 0]
        return (min(matches)[0], min(matches)[2]) if matches else None

    def open(self, text: str) -> int:
        """Number of characters at the end of a text that may be the beginning of a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop if len(s) > n):
                return n
        return 0


class SampleText:
    """Text of a sample while it is drawn: the shown text, and the stop string that ended it.

    All texts are those behind the prompt (`csd.models.text.context`).

    Stop strings are searched for in the text with special tokens. The shown text, with special
    tokens or without, is cut at the same token.

    streams: whether `take` is called while tokens arrive. answer: place in a growing text from
    which on stop strings count, None before one; by default they count everywhere.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        *,
        include_stop: bool,
        skip_special_tokens: bool,
        streams: bool,
        prompt: Sequence[int] = (),
        answer: Callable[[str], int | None] | None = None,
    ):
        self._context = TextContext(tokenizer, prompt, skip_special_tokens)
        self._answer = answer
        self._start = 0 if answer is None else None  # of the text in which they are searched for
        self._include_stop = include_stop
        self._stop = StopStrings(stop) if stop else None
        self._tokens: list[int] = []
        # text with special tokens, in which stop strings are searched for
        self._full = TextStream(tokenizer, False, prompt) if stop else None
        self._shown = TextStream(tokenizer, skip_special_tokens, prompt) if streams else None
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
        added, text = len(self._full.push(token)), self._full.text
        if self._start is None and self._answer is not None:
            self._start = self._answer(text)
            added = len(text)
        if self._start is None or not added:
            return False
        match = self._stop.find(text, added, self._start)
        if match is None:
            return False
        start, self.stop_string = match
        self._cut = start + len(self.stop_string) if self._include_stop else start
        return True

    def take(self) -> str:
        """The shown text that became certain since the last call."""
        # before the answer begins: a stop string in the thought may be one of the answer yet
        if self._shown is None or self._start is None:
            return ""
        end = self._shown.settled
        if self._full is not None and self._stop is not None:
            # a token that is held back in either stream is certain in neither
            full = self._full.text
            certain = min(self._full.settled, len(full) - self._stop.open(full))
            end = min(end, self._place(certain, certain=True))
        return self._upto(self._shown.text[:end])

    def keep(self, count: int) -> None:
        """Leave out the tokens after the first `count` in the result of `finish`."""
        del self._tokens[count:]

    def finish(self, by_token: bool) -> tuple[str, str]:
        """The whole shown text, and its part that `take` has not returned yet.

        by_token: whether an end token, which is the last token, ended the sample.
        """
        if self._cut is not None:
            text = self._context.text(self._tokens)[: self._place(self._cut)]
        else:
            left_out = by_token and not self._include_stop
            text = self._context.text(self._tokens[:-1] if left_out else self._tokens)
        return text, self._upto(text)

    def _upto(self, text: str) -> str:
        added = text[self._taken :]
        self._taken = max(self._taken, len(text))
        return added

    def _place(self, index: int, certain: bool = False) -> int:
        """Index in the shown text, or in its certain part, of index `index` in the full text.

        `index` lies in the text of one token, or of several that make up a character. The index is
        counted from that text's end, since a decoder may strip the space before the first shown
        token.
        """
        assert self._full is not None
        ends = self._full.ends
        i = bisect_right(ends, index)  # the first token whose text ends after `at`
        base = ends[i - 1] if i else 0
        first = bisect_left(ends, base) + 1 if base else 0
        low = self._length(first, certain)
        if i == len(ends):
            return low
        high = self._length(i + 1, certain)
        return min(max(high - (ends[i] - index), low), high)

    def _length(self, count: int, certain: bool) -> int:
        """Length of the shown text of the first `count` tokens."""
        if certain and self._shown is not None:
            return self._shown.ends[count - 1] if count else 0
        return len(self._context.text(self._tokens[:count]))
