"""Prompt lookup: continuation of the last n tokens in the sample's own text, as a chain."""

from dataclasses import dataclass, field
from typing import Any

from csd.graph.host_tree import HostTree
from csd.research.baselines.host_drafter import HostDrafter
from csd.state.pool import OWN, PROMPT


@dataclass(slots=True)
class LookupText:
    """A text, and the latest continuation of each of its n-grams up to `size` tokens."""

    size: int
    tokens: list[int] = field(default_factory=list)
    # n-gram -> index of its continuation
    continuation: dict[tuple, int] = field(default_factory=dict)

    def append(self, token: int) -> None:
        end = len(self.tokens)
        for n in range(1, min(self.size, end) + 1):
            self.continuation[tuple(self.tokens[end - n :])] = end
        self.tokens.append(token)

    def copy(self) -> "LookupText":
        return LookupText(self.size, self.tokens.copy(), self.continuation.copy())

    def follow(self) -> int:
        """Index of the continuation of the longest matching end of the text, or -1."""
        for n in range(min(self.size, len(self.tokens)), 0, -1):
            index = self.continuation.get(tuple(self.tokens[-n:]))
            if index is not None:
                return index
        return -1


class PromptLookup(HostDrafter):
    """size: tokens of the longest n-gram that is looked up; shorter ones if it has no match."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.size = size

    def open(self, prompt: list[int]) -> tuple[int, LookupText, dict[int, LookupText]]:
        text = LookupText(self.size)
        for token in prompt:
            text.append(token)
        return len(prompt), text, {}

    def extend(self, group: Any, sample: int, tokens: list[int], probs: list[float]) -> None:
        _, prompt, texts = group
        text = texts.get(sample)
        if text is None:
            text = texts[sample] = prompt.copy()
        for token in tokens:
            text.append(token)

    def draft(self, group: Any, sample: int, tree: HostTree) -> None:
        length, prompt, texts = group
        text = texts.get(sample, prompt)
        index = text.follow()
        if index >= 0:
            source = PROMPT if index < length else OWN
            tree.chain(text.tokens[index : index + tree.nodes], source)
