"""Mapping of vLLM's batch rows to samples, and their new tokens as a step for a graph.

vLLM passes rows of token ids to its proposer, without request names or ends. A row is therefore
matched by its text, which is its token ids: it continues the sample whose text it begins with,
whichever row that was before. Otherwise the text before its new tokens is a prompt, whose group it
joins or begins. A sample ends when it has not occurred for `patience` calls, and a group ends with
its last sample.

Committed tokens reach the graph as the slots, pool and verdict of a step (`committed`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from csd.graph.consensus import ConsensusGraph
from csd.kernels.common.sorted_runs import starts
from csd.kernels.draft.constants import max_path_cost
from csd.kernels.draft.reference import Drafted, Estimates, cheapest, draft_pool
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.pool_builder import Nodes
from csd.state.slots import Slots
from csd.state.verdict import RUNNING, TOP, Verdict

# limit of tokens that a row may gain between two calls besides the new ones: vLLM skips the
# proposer while a row of the batch is near the model's length
GAP = 64


@dataclass(eq=False, slots=True)
class PromptGroup:
    """The samples of one prompt."""

    key: int  # never reused
    index: int  # among the groups in flight
    prompt: np.ndarray  # [P] int32
    finished: deque  # (number, token ids) of the samples that ended last
    last: int  # the latest call with one of its samples
    begun: int = 0  # samples so far


@dataclass(eq=False, slots=True)
class RequestSample:
    group: PromptGroup
    number: int
    text: np.ndarray  # int32, prompt and tokens, with room for the model's length
    length: int  # tokens of the text
    new: list[int] = field(default_factory=list)  # tokens added by the latest call
    calls: int = 0  # number of calls with this sample
    last: int = 0  # the latest of these calls


class InFlight:
    """The samples and groups in flight.

    rows: most rows of a batch. length: most tokens of a text. keep: most finished samples of a
        group.
    begin, release: called with a group when its first sample begins and when its last has ended.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        patience: int,
        keep: int,
        begin: Callable[[PromptGroup], None],
        release: Callable[[PromptGroup], None],
    ):
        self.length, self.patience, self.keep = length, patience, keep
        self.group_slots = 2 * rows  # one is free even if this call's and the last's groups differ
        self.groups: dict[bytes, PromptGroup] = {}
        self.samples: list[RequestSample] = []  # in the order in which they began
        self._begin_group, self._release_group = begin, release
        self._free = list(range(self.group_slots))[::-1]
        self._at: dict[int, RequestSample] = {}  # by row of the last call
        self._call = self._keys = 0

    def find(self, texts: dict[int, tuple[np.ndarray, int]]) -> dict[int, RequestSample]:
        """Returns the sample of each row, updated by the row's new tokens.

        texts: for each row all of its tokens, and the number of them that its last step sampled.
        """
        self._call += 1
        samples: dict[int, RequestSample] = {}
        rows = [(i, text, text[: text.size - new]) for i, (text, new) in texts.items()]
        # first the samples that are in the same row as before, which most are
        for i, text, before in rows:
            sample = self._at.get(i)
            if sample and self._goes_on(sample, before):
                samples[i] = self._add(sample, text)
        moved = [row for row in rows if row[0] not in samples]
        for i, text, before in moved:
            matches = [s for s in self.samples if self._goes_on(s, before)]
            if matches:
                samples[i] = self._add(max(matches, key=lambda s: s.length), text)
        for i, text, before in moved:
            if i not in samples:
                samples[i] = self._add(self._begin(before), text)
        self._at = samples
        self._retire()
        return samples

    def _goes_on(self, sample: RequestSample, before: np.ndarray) -> bool:
        """True if a row, whose text is `before` and then its new tokens, continues this sample.

        A sample that was not in the last call was not running, so it has gained no tokens since.
        """
        n = sample.length
        gap = GAP if sample.last == self._call - 1 else 0
        if sample.last == self._call or not before.size - gap <= n <= before.size:
            return False
        # a cheap test first: texts of other samples mostly differ in the last token
        return before[n - 1] == sample.text[n - 1] and np.array_equal(before[:n], sample.text[:n])

    def _add(self, sample: RequestSample, text: np.ndarray) -> RequestSample:
        new = text[sample.length :]
        sample.text[sample.length : text.size] = new
        sample.new, sample.length = new.tolist(), text.size
        sample.calls, sample.last, sample.group.last = sample.calls + 1, self._call, self._call
        return sample

    def _begin(self, prompt: np.ndarray) -> RequestSample:
        ids = prompt.astype(np.int32)
        group = self.groups.get(ids.tobytes())
        if group is None:
            if not self._free:
                self._release(min(self.groups.values(), key=lambda g: g.last))
            self._keys += 1
            group = PromptGroup(
                self._keys, self._free.pop(), ids, deque(maxlen=self.keep), self._call
            )
            self.groups[ids.tobytes()] = group
            self._begin_group(group)
        # the system allocates its memory pages when they are written
        text = np.empty(self.length, np.int32)
        text[: ids.size] = ids
        sample = RequestSample(group, group.begun, text, ids.size)
        group.begun += 1
        self.samples.append(sample)
        return sample

    def _retire(self) -> None:
        """End the samples and groups that have not occurred for `patience` calls."""
        oldest = self._call - self.patience
        ended = [s for s in self.samples if s.last < oldest]
        if ended:
            self._end(ended)
        for group in [g for g in self.groups.values() if g.last < oldest]:
            self._release(group)

    def _end(self, ended: list[RequestSample]) -> None:
        for s in ended:
            s.group.finished.append((s.number, s.text[s.group.prompt.size : s.length].tolist()))
        gone = set(ended)
        self.samples = [s for s in self.samples if s not in gone]

    def _release(self, group: PromptGroup) -> None:
        self._end([s for s in self.samples if s.group is group])
        self._release_group(group)
        self._free.append(group.index)
        del self.groups[group.prompt.tobytes()]


# largest number of tokens of a row per insertion
ENTERED = MAX_DEPTH + 1


def windows(sample: RequestSample, first: int, count: int, N: int) -> np.ndarray:
    """[count, N] int32: the N tokens before `count` positions from `first` on, latest first.

    Entries before the text's start are -1.
    """
    text = sample.text[max(first - N, 0) : first + count - 1]
    text = np.pad(text, (N + count - 1 - text.size, 0), constant_values=-1)
    return np.lib.stride_tricks.sliding_window_view(text, N)[:, ::-1]


def committed(part: dict[int, RequestSample], begin: int, slots: Slots) -> tuple[Pool, Verdict]:
    """Pool and verdict of a step that commits each row's new tokens from `begin` on, <= ENTERED.

    The rows of the pool are the accepted ones; only the fields that a graph reads are filled in.
    """
    new = [s.new[begin : begin + ENTERED] for s in part.values()]
    N, M = slots.context.shape[1], sum(map(len, new))
    count = np.array([len(x) for x in new])
    slot, start = np.array(list(part)), count.cumsum() - count
    depth = np.arange(M) - start.repeat(count)
    pool = Pool.empty(M, slots.count, slots.group_key.shape[0], N)
    pool.slot.copy_(torch.from_numpy(slot.repeat(count)))
    pool.depth.copy_(torch.from_numpy(depth))
    pool.context.copy_(
        torch.from_numpy(
            np.concatenate(
                [
                    windows(s, s.length - len(s.new) + begin, n, N)
                    for s, n in zip(part.values(), count.tolist(), strict=True)
                ]
            )
        )
    )
    accept_row = torch.full((slots.count, ENTERED), -1, dtype=torch.int32)
    accept_row[pool.slot.long(), pool.depth.long()] = torch.arange(M, dtype=torch.int32)
    none = torch.zeros(M)
    return pool, Verdict(
        sample=torch.tensor([t for x in new for t in x], dtype=torch.int32),
        logprob=none,
        raw_logprob=none,
        top_token=torch.full((M, TOP), -1, dtype=torch.int32),
        top_prob=torch.zeros(M, TOP),
        accept_row=accept_row,
        accept_count=(accept_row >= 0).sum(1, dtype=torch.int32),
        finish=torch.full((slots.count,), RUNNING, dtype=torch.int32),
        bad=torch.zeros(slots.count, dtype=torch.bool),
    )


def empty_slots(rows: int, groups: int, context: int) -> Slots:
    """Make slots with temperature 0, since drafts cannot use vLLM's sampling noise."""
    slots = Slots.empty(rows, vocab=1, max_new=1, context=context)
    slots.temperature.fill_(0)
    slots.group_key = torch.full((groups,), -1)
    slots.prompt_len, slots.prior_part = torch.zeros(2, groups, dtype=torch.int32)
    return slots


class ConsensusChain(ConsensusGraph):
    """Chains of each node's likeliest child, of equal ones the smaller token; in numpy on the host.

    The likeliest nodes over all slots fill the pool, so a slot's chain may end early.
    """

    def propose(
        self, slots: Slots, rows: int, noise: Any = None, *, nodes: int | None = None
    ) -> Pool:
        state = Estimates(self.table, slots, self.config, noise)
        return draft_pool(partial(_grow, state), slots, rows, nodes)


def _grow(state: Estimates, slot: np.ndarray, budget: int) -> Drafted | None:
    """The `budget` cheapest nodes of the slots' chains, cheapest first; None if there are none."""
    config, slots = state.config, state.slots
    limit = np.minimum(slots.max_new - 1 - slots.generated, min(config.max_depth, MAX_DEPTH))
    path = max_path_cost(config)
    cost, parent = np.zeros(slot.size, np.int64), np.full(slot.size, -1)
    context = slots.context[slot]
    levels: list[Drafted] = []
    count, depth = 0, 0
    while True:
        depth += 1
        room = limit[slot] >= depth
        slot, cost, parent, context = slot[room], cost[room], parent[room], context[room]
        children = state.children(slot, context, depth, path - cost) if slot.size else None
        if children is None or not children.parent.size:
            break
        order = np.lexsort((children.token, children.edge, children.parent))
        order = order[starts(children.parent[order])]
        above = children.parent[order]
        cost, token, slot = cost[above] + children.edge[order], children.token[order], slot[above]
        source, depths = children.source[order], np.full(above.size, depth)
        levels.append(Nodes(cost, token, slot, depths, parent[above], source))
        context = np.column_stack([token.astype(np.int32), context[above, :-1]])
        parent = np.arange(above.size) + count
        count += above.size
    return cheapest(levels, budget) if levels else None
