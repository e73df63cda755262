"""What begins and ends a model's thought, and which of a sample's tokens a spent budget forced."""

import re
from typing import Any

from csd.schema.check import shown

# what begins a thought in the templates of models that think
_BEGIN = re.compile(
    r"<(think|thinking|thought|reason|reasoning|analysis|seed:think)>|\[(THINK)\]"
)

Tags = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def find_tags(tokenizer: Any) -> tuple[str, str]:
    """What begins and ends a thought by the chat template, else by the tokenizer's own tokens."""
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
        "max_thinking_tokens needs what begins and ends a thought, which the chat template does "
        "not show: pass thinking_tags=('<think>', '</think>')"
    )


def spell(name: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a text. Raises ValueError, naming the argument, where there are none."""
    if tokenizer is None:
        raise ValueError(
            f"{name} that are strings need a tokenizer: pass tokenizer= or token ids"
        )
    try:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:
        raise ValueError(
            f"{name} must be texts that the tokenizer reads, got {shown(text)}: {error}"
        ) from error


def spell_tags(tags: tuple[Any, ...], tokenizer: Any) -> Tags:
    """Token ids of what begins a thought, of what ends it, and of what is written to end it."""
    found = []
    for tag in tags:
        found.append(spell("thinking_tags", tag, tokenizer) if isinstance(tag, str) else tag)
    begin, end, close = found[0], found[1], found[-1]
    if not begin or close[len(close) - len(end) :] != end:
        raise ValueError(
            f"thinking_tags must have a third that ends with the second, as token ids {list(end)}, "
            f"got {shown(list(close))}"
        )
    return begin, end, close


class Budget:
    """How a sample stands to its budget of thought, token by token.

    As `csd.kernels.change_rows.forced_tokens` has it of whole prefixes.
    """

    def __init__(self, tags: Tags, most: int, prompt: list[int]):
        self.begin, self.end, self.close = map(list, tags)
        self.most, self.spent, self.open = most, 0, False
        self._seen: list[int] = []
        for token in prompt:
            self._read(token)

    def forced(self) -> int:
        """The only token that may come next, -1 where it is free."""
        if not self.open or self.spent < self.most:
            return -1
        for k in range(len(self.close) - 1, 0, -1):
            if self._ends(self.close[:k]):
                return self.close[k]
        return self.close[0]

    def push(self, token: int) -> None:
        """Read a token of the sample."""
        self.spent += self.open
        self._read(token)

    def _read(self, token: int) -> None:
        self._seen.append(token)
        # one that ends both is an end
        if self._ends(self.end):
            self.open = False
        elif self._ends(self.begin):
            self.open = True

    def _ends(self, tokens: list[int]) -> bool:
        return self._seen[-len(tokens) :] == tokens


def forced_places(tags: Tags, most: int, prompt: list[int], tokens: list[int]) -> list[bool]:
    """Of each of a sample's tokens, whether the budget had forced it."""
    budget, found = Budget(tags, most, prompt), []
    for token in tokens:
        found.append(budget.forced() >= 0)
        budget.push(token)
    return found
