"""Base class of host drafters: one tree of Python lists per sample, converted to a pool.

They reproduce published methods, for comparison. A step's spare rows are shared equally, as if the
drafter served one request at a time.
"""

import math
from typing import Any

from csd.graph.drafter import Drafter
from csd.graph.host_tree import HostTree, pool_of_trees
from csd.kernels.draft import DraftNoise
from csd.state.pool import MAX_DEPTH, MAX_NODES, Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict


class HostDrafter(Drafter):
    """Base class that manages groups and samples; a subclass drafts.

    A group's state is what `open` returns; it is dropped when the group is no longer in flight.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Any] = {}

    def open(self, prompt: list[int]) -> Any:
        """Returns the state of a new group."""
        raise NotImplementedError

    def draft(self, group: Any, sample: int, tree: HostTree) -> None:
        """Fill `tree` with continuations of `sample`."""
        raise NotImplementedError

    def extend(self, group: Any, sample: int, tokens: list[int], probs: list[float]) -> None:
        """Append `tokens` to `sample`; the target drew them with these probabilities."""
        raise NotImplementedError

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Open a new group once its prompt is read, and drop ended groups."""
        if read < len(prompt):
            return read
        alive = set(slots.group_key.tolist()) | {group_key}
        self._groups = {key: group for key, group in self._groups.items() if key in alive}
        self._groups[group_key] = self.open(prompt)
        return read

    def propose(self, slots: Slots, rows: int, noise: DraftNoise | None = None) -> Pool:
        """Draft trees of all live slots in `rows` rows. Noise is not used."""
        key, group = slots.group_key.tolist(), slots.group.tolist()
        sample, room = slots.sample.tolist(), (slots.max_new - 1 - slots.generated).tolist()
        live = slots.live.nonzero()[:, 0].tolist()
        trees = {}
        for i, s in enumerate(live):
            spare = rows - len(live)
            nodes = spare // len(live) + (i < spare % len(live))
            tree = HostTree(min(nodes, MAX_NODES - 1), min(room[s], MAX_DEPTH))
            if tree.nodes > 0 and tree.depth > 0:
                self.draft(self._groups[key[group[s]]], sample[s], tree)
            trees[s] = tree
        return pool_of_trees(trees, slots, rows)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Insert the committed tokens."""
        key, group, sample = slots.group_key.tolist(), slots.group.tolist(), slots.sample.tolist()
        drawn, logprob = verdict.sample.tolist(), verdict.logprob.tolist()
        path = verdict.accept_row.tolist()
        for s, count in enumerate(verdict.accept_count.tolist()):
            if count:
                rows = path[s][:count]
                self.extend(
                    self._groups[key[group[s]]],
                    sample[s],
                    [drawn[r] for r in rows],
                    [math.exp(logprob[r]) for r in rows],
                )
