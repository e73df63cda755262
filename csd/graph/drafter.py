"""The interface between a step and a drafter."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from csd.graph.history import PastSample
from csd.state.kv_cache import KVCache
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict


class Drafter:
    """Base of all drafters. An engine keeps one for many calls; groups come and go."""

    context: int = 1  # tokens of context that `Slots` must keep

    def suits(self, tokens: int, history: bool) -> bool:
        """Whether it serves a call of so many tokens, of prompts, earlier and new samples.

        history: whether there are past samples.
        """
        return True

    def max_history(self, history: Sequence[PastSample], groups: int) -> int | None:
        """Number of a prompt's past samples that it has room for, with `groups` in flight.

        None where it drafts from no history.
        """
        return None

    @property
    def dropped(self) -> torch.Tensor | None:
        """[1] int64: contexts that found no room since it was made; None where nothing is."""
        return None

    def cache_bytes(self, pages: int) -> int:
        """Memory that keys and values of its own take beside so many pages of the target's."""
        return 0

    def attach(self, decoder: Any, cache: KVCache) -> None:
        """Called once, before the first prompt: the target, and the cache beside which it may keep
        one of its own.

        Raises ValueError where what it drafts from does not fit the target's vocabulary.
        """

    def start_call(self) -> None:
        """A call begins. It must draft as it would in a new engine: what was learned of the texts
        of earlier calls is forgotten."""

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Called after each chunk of a new group's prompt, and once more with all of it.

        observed: the result of the last of these calls, 0 at first. read: tokens of the prompt that
        have been read. A drafter that has much to do with a prompt does a part of it and returns
        how far it got; others wait until all is read.
        """
        raise NotImplementedError

    def enter_history(
        self, group_key: int, prompt: list[int], history: Sequence[PastSample], slots: Slots
    ) -> Iterator[int]:
        """Enter past samples of a new group's prompt, all of which has been read.

        Each `next` enters a piece and gives its rows, so that steps can run in between.
        """
        raise NotImplementedError

    def propose(self, slots: Slots, rows: int) -> Pool:
        """Draft trees of all live slots in at most `rows` rows, roots included."""
        raise NotImplementedError

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        """The target's last hidden states [M, hidden] at the rows of the step that is running, or
        of the chunk of a prompt that `observe_prompt` is called with next."""

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Update with what the step decided; the slots have advanced.

        defer: the step had no drafts, and the update may wait until `flush`.
        """
        raise NotImplementedError

    def flush(self, slots: Slots) -> None:
        """Update with what was deferred. A step calls it before each `propose`, and does not count
        its time as time that drafts take."""


class StaticDrafter(Drafter):
    """A drafter whose shapes are fixed and that never reads the device: a static step can hold it.

    nodes: drafted nodes at most; the rest of `rows` is padding.
    """

    def propose(
        self, slots: Slots, rows: int, noise: Any = None, *, nodes: int | None = None
    ) -> Pool:
        raise NotImplementedError
