"""Other drafters with past samples of a prompt, in the form that suits each best.

A trie and a suffix tree have them as finished samples of the group. Prompt lookup has them in front
of the prompt, oldest first, in the text that it searches, so that it matches nearer text first.
"""

from typing import Any

from bench.studies.drafting.baselines import Trie
from csd.graph.baselines.host_drafter import HostDrafter
from csd.graph.baselines.prompt_lookup import PromptLookup
from csd.graph.baselines.suffix import Suffix
from csd.graph.history import PastSample

RIVALS_WITH_HISTORY = ("trie", "trie-frequency", "trie-prompt", "suffix-tree", "prompt-lookup")


def with_history(name: str, history: list[PastSample]) -> HostDrafter:
    """Make a drafter with `history`, newest first, in its text."""
    texts = [past.tokens.tolist() for past in reversed(history)]
    if name == "prompt-lookup":
        return _Lookup(texts)
    drafter: HostDrafter
    if name == "suffix-tree":
        # the options that were best on recorded samples
        drafter = Suffix(True, factor=4, offset=4, least=0)
    else:
        drafter = Trie(frequency=name == "trie-frequency", prompt=name == "trie-prompt")
    open_group = drafter.open

    def opened(prompt: list[int]) -> Any:
        group = open_group(prompt)
        for i, text in enumerate(texts):
            # as finished samples, with indices that no live sample has; token by token, since a
            # trie inserts at most as many tokens at once as a step commits
            for token in text:
                drafter.extend(group, -1 - i, [token], [1.0])
        return group

    drafter.open = opened  # type: ignore[method-assign]
    return drafter


class _Lookup(PromptLookup):
    """Prompt lookup that also searches past samples."""

    def __init__(self, texts: list[list[int]]):
        super().__init__()
        self._texts = texts

    def open(self, prompt: list[int]) -> Any:
        return super().open([t for text in self._texts for t in (*prompt, *text)] + prompt)
