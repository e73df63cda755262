"""Tags that begin and end a model's thought, and the tokens that a spent budget forces."""

import re
from collections import deque
from copy import copy
from typing import Any

from csd.schema.check import shown

# names of tags around a thought in the chat templates of thinking models
_IN_ANGLES, _IN_BRACKETS = "think|thinking|thought|reason|reasoning|analysis|seed:think", "THINK"
_BEGIN = re.compile(rf"<({_IN_ANGLES})>|\[({_IN_BRACKETS})\]")
# a begin or an end tag; `close` is the slash of an end tag
TAG = re.compile(
    rf"[<\[](?P<close>/?)(?P<name>(?<=[</])(?:{_IN_ANGLES})(?=>)|{_IN_BRACKETS}(?=\]))[>\]]"
)

Tags = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def find_tags(tokenizer: Any) -> tuple[str, str]:
    """Begin and end tags of a thought in the chat template, else among the added tokens.

    Raises ValueError if neither has a pair of tags.
    """
    template = getattr(tokenizer, "chat_template", None)
    texts = [*template.values()] if isinstance(template, dict) else [template]
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    every = [text for text in texts if isinstance(text, str)]
    for text in [*every, " ".join(added)]:
        for match in _BEGIN.finditer(text):
            begin = match.group(0)
            end = f"{begin[0]}/{begin[1:]}"
            if end in text:
                return begin, end
    raise ValueError(
        "max_thinking_tokens needs the begin and end of a thought, which the chat template does "
        "not contain: pass thinking_tags=('<think>', '</think>')"
    )


def spell(name: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a text. Raises ValueError, naming the argument, if it cannot be tokenized."""
    if tokenizer is None:
        raise ValueError(f"{name} given as strings need a tokenizer: pass tokenizer= or token ids")
    try:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:
        raise ValueError(
            f"{name} must be strings that the tokenizer can encode, got {shown(text)}: {error}"
        ) from error


def spell_tags(tags: tuple[Any, ...], tokenizer: Any) -> Tags:
    """Token ids of the begin tag, the end tag and the closing text, which ends with the end tag.

    The closing text, written when the budget is spent, is the last of `tags`, of which there are
    two or three. Raises ValueError for tags that do not fit together.
    """
    found = []
    for tag in tags:
        found.append(spell("thinking_tags", tag, tokenizer) if isinstance(tag, str) else tag)
    begin, end, close = found[0], found[1], found[-1]
    if not begin or not end or begin[-len(end) :] == end:
        raise ValueError(
            "thinking_tags must have a begin and an end of at least one token, and the begin must "
            f"not end with the end, got token ids {list(begin)} and {list(end)}"
        )
    if close[len(close) - len(end) :] != end:
        raise ValueError(
            "thinking_tags must have a third entry that ends with the second, as token ids "
            f"{list(end)}, got {shown(list(close))}"
        )
    return begin, end, close


class Budget:
    """Thinking budget of a sample, updated token by token.

    `csd.kernels.change_rows.forced_tokens` computes the same from whole prefixes.

    once: a sample has at most one thought, which its prompt leaves open or which it begins with.
    """

    def __init__(self, tags: Tags, most: int, prompt: list[int], once: bool = False):
        self.begin, self.end, self.close = map(list, tags)
        self.most, self.spent, self.open = most, 0, False
        self.over = False  # with `once`: True if no thought can follow
        self._once, self._pushed = once, 0
        # the last tokens, as many as the longest tag has
        self._last: deque[int] = deque(maxlen=max(map(len, tags)))
        for token in prompt:
            self._last.append(token)
            self._turn()

    def copy(self) -> "Budget":
        found = copy(self)
        found._last = self._last.copy()
        return found

    def forced(self) -> int:
        """The only token that may come next, or -1 if none is forced."""
        if not self.open or self.spent < self.most:
            return -1
        return self.close[self._begun()]

    def opening(self) -> int:
        """The next token of the begin tag, if the sample's thought may still begin; else -1."""
        if not self._once or self.open or self.over:
            return -1
        return self.begin[self._pushed]

    def only(self) -> list[int]:
        """Tokens that must come next: the rest of the closing text or of the begin tag."""
        if self.forced() >= 0:
            return self.close[self._begun() :]
        return [] if self.opening() < 0 else self.begin[self._pushed :]

    def push(self, token: int) -> None:
        """Update the budget with the sample's next token."""
        opening = self.opening()
        self.spent += self.open
        self._pushed += 1
        self._last.append(token)
        if not self._once:
            self._turn()
        elif self.open:
            self.over = self._ends(self.end)
            self.open = not self.over
        elif not self.over:
            self.over = token != opening
            self.open = not self.over and self._pushed == len(self.begin)

    def _begun(self) -> int:
        """Number of tokens of the closing text that the sample already ends with."""
        counts = range(len(self.close) - 1, 0, -1)
        return next((k for k in counts if self._ends(self.close[:k])), 0)

    def _turn(self) -> None:
        # a token that completes both tags ends the thought
        if self._ends(self.end):
            self.open = False
        elif self._ends(self.begin):
            self.open = True

    def _ends(self, tokens: list[int]) -> bool:
        return [*self._last][-len(tokens) :] == tokens


def forced_places(
    tags: Tags, most: int, prompt: list[int], tokens: list[int], once: bool = False
) -> list[bool]:
    """Flags, one per token of a sample: True if the budget forced the token."""
    budget, found = Budget(tags, most, prompt, once), []
    for token in tokens:
        found.append(budget.forced() >= 0)
        budget.push(token)
    return found
