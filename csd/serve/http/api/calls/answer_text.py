"""Content and calls of a choice's text, as a whole and while it is drawn.

A text is a thought, or none, and an answer, in which each mark of the format may begin a call. A
call is whatever can be read as one; everything else stays content: words around calls, thoughts,
objects that are no JSON, and calls of unknown tools. Spaces beside a call are no content.

A thought is at the beginning of the text, or the prompt leaves it open; it reaches to its end tag
or to the text's end. Behind it, a begin tag counts only with its end tag: words may name one.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from csd.engine.options.open_thought import Front, Pairs
from csd.engine.options.thinking import PAIRS
from csd.serve.http.api.calls.forms import Form
from csd.serve.http.api.calls.json_text import Call, Part


@dataclass(frozen=True, slots=True)
class Shape:
    """Format and tools by which the texts of a request's choices are read.

    form: of calls. schemas: of the tools' arguments, by name. tags: pairs that begin and end a
    thought; empty if texts have no thoughts.
    """

    form: Form
    schemas: Mapping[str, Any]
    tags: Pairs = PAIRS

    @property
    def places(self) -> re.Pattern[str]:
        """Pattern of marks and tags, with the groups `mark`, `begin` and `end`."""
        return _patterns(self.form.marks, self.tags)[0]

    @property
    def begun(self) -> re.Pattern[str]:
        """Pattern of the end of a text that may begin a mark or a tag."""
        return _patterns(self.form.marks, self.tags)[1]

    def ends(self, begin: str | None) -> list[str]:
        """End tags of a thought; of one that the prompt opened, begin is None, and any ends it."""
        return [end for own, end in self.tags if begin in (None, own)]


@lru_cache
def _patterns(marks: tuple[str, ...], tags: Pairs) -> tuple[re.Pattern[str], re.Pattern[str]]:
    groups = {
        "mark": marks,
        "begin": tuple(begin for begin, _ in tags),
        "end": tuple(end for _, end in tags),
    }
    places = "|".join(f"(?P<{name}>{_any(texts)})" for name, texts in groups.items())
    beginnings = {text[:n] for texts in groups.values() for text in texts for n in range(len(text))}
    return re.compile(places), re.compile(rf"(?:{_any(beginnings - {''})})\Z")


def _any(texts: Collection[str]) -> str:
    # the longest of those that begin alike
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def content_and_calls(shape: Shape, text: str, opened: bool) -> tuple[str, list[Call]]:
    """Content and calls of a whole text. opened: True if the prompt leaves a thought open."""
    first, *parts = _parts(shape, text, opened)
    calls = [part for part in (first, *parts) if not isinstance(part, str)]
    if not calls:
        return text, []
    content = first.rstrip() if isinstance(first, str) else ""
    for part in parts:
        if isinstance(part, str):
            content += part.rstrip() if content else part.strip()
    return content, calls


def _parts(shape: Shape, text: str, opened: bool) -> list[Part]:
    """Parts of a text in their order, the first of which is its content in front of a call."""
    front = Front(shape.tags, opened)
    start = front.push(text, len(text))
    if start is None:
        return [text]
    parts: list[Part] = []
    taken = 0  # length of the text whose parts are in the list
    unclosed: set[str] = set()

    def read(at: int) -> int | None:
        nonlocal taken
        call = shape.form.read(text, at, shape.schemas)
        if call is None:
            return None
        more, end = call
        if any(not isinstance(part, str) for part in more):
            parts.extend([text[taken:at], *more])
            taken = end
        return end

    answer = text[start:].lstrip()
    if shape.form.front is not None and shape.form.front(answer, shape.schemas):
        start = read(len(text) - len(answer)) or start
    while match := shape.places.search(text, start):
        start = match.end()
        if match["mark"]:
            start = read(match.start()) or start
        elif (begin := match["begin"]) and begin not in unclosed:
            (end,) = shape.ends(begin)
            at = text.find(end, start)
            if at < 0:
                unclosed.add(begin)
            else:
                start = at + len(end)
    return [*parts, text[taken:]]


class Certain:
    """Length of the content that no further text can change, as the text grows.

    opened: True if the prompt leaves a thought open.
    """

    def __init__(self, shape: Shape, opened: bool):
        self._shape, self._opened = shape, opened
        self._front = Front(shape.tags, opened)
        self.start: int | None = None  # of the answer; None while it has not begun
        self._at: int | None = None  # place up to which the answer has been read
        self._begin: str | None = None  # begin tag of a thought that is open in the answer
        self._held: int | None = None  # the first place from which on a call may be read
        self.length = 0

    def push(self, text: str) -> int:
        """The length of the certain content of a text that begins with that of the last call."""
        begun = self._shape.begun.search(text, max(len(text) - _LONGEST, 0))
        end = len(text) if begun is None else begun.start()
        limit = max(self._limit(text, end), self.length)
        # spaces before a call are no content
        self.length += len(text[self.length : limit].rstrip())
        return self.length

    def _limit(self, text: str, end: int) -> int:
        if self.start is None:
            if not self._opened and not text[:end].strip():
                return 0
            self.start = self._front.push(text, end)
            if self.start is None:
                return end
        shape = self._shape
        if self._at is None:
            answer, front = text[self.start : end].lstrip(), shape.form.front
            if not answer or (front is not None and front(answer, shape.schemas)):
                return self.start
            self._at = self.start
        while (self._held is None or self._begin is not None) and (
            match := shape.places.search(text, self._at, end)
        ):
            self._at = match.end()
            if match["mark"]:
                self._held = match.start() if self._held is None else self._held
            elif self._begin is None:
                self._begin = match["begin"]
            elif match["end"] in shape.ends(self._begin):
                self._begin = self._held = None
        self._at = max(self._at, end)
        return end if self._held is None else min(self._held, end)


# characters of a tag or a mark
_LONGEST = 64
