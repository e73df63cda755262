"""What a step asks of a drafter, and tells it."""

import torch

from csd.pool import Pool
from csd.slots import Slots
from csd.verdict import Verdict


class Drafter:
    """Base of all drafters. An engine keeps one for many calls; groups come and go."""

    context: int = 1  # tokens of context that `Slots` must keep

    def start(self, group_key: int, prompt: list[int], slots: Slots) -> None:
        """A new group, whose samples start at its prompt's last token."""
        raise NotImplementedError

    def hear(
        self, group_key: int, prompt: list[int], heard: int, read: int, slots: Slots
    ) -> int:
        """A new group's prompt while it is read, after each chunk; then all of it, once.

        heard: what the last of these calls returned, 0 at first. read: tokens of it that have been
        read. A drafter that has much to do with a prompt does a part of it and returns how far it
        is; others `start` when all is read.
        """
        if read == len(prompt):
            self.start(group_key, prompt, slots)
        return read

    def propose(self, slots: Slots, rows: int) -> Pool:
        """Draft trees of all live slots in at most `rows` rows, roots included."""
        raise NotImplementedError

    def see(self, hidden: torch.Tensor) -> None:
        """The target's last hidden states [M, D] at the rows of the step that is running."""

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """What the step decided; the slots have moved on."""
        raise NotImplementedError
