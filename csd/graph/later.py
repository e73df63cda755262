"""Updates of steps without drafts, which wait until the graph is read again.

A step without drafts then takes what it takes without a graph, and many updates together take
little more than one.
"""

from typing import Any, NamedTuple

import torch

from csd.kernels.observe import Observed
from csd.kernels.ops import Ops
from csd.state.context_table import GraphConfig
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# rows of all waiting steps at most; observing takes memory by their square
MOST_ROWS = 256


class _Slots(NamedTuple):
    """What `observe` reads of `Slots`, as they were in the step."""

    group: torch.Tensor
    sample: torch.Tensor
    group_key: torch.Tensor
    step: torch.Tensor

    @property
    def count(self) -> int:
        return self.group.shape[0]


class _Pool(NamedTuple):
    slot: torch.Tensor
    depth: torch.Tensor
    context: torch.Tensor


class _Verdict(NamedTuple):
    sample: torch.Tensor
    top_token: torch.Tensor
    top_prob: torch.Tensor
    accept_row: torch.Tensor


class Later:
    """The waiting steps."""

    def __init__(self) -> None:
        self._steps: list[tuple[Pool, _Slots, Verdict]] = []
        self.rows = 0

    @property
    def full(self) -> bool:
        return self.rows >= MOST_ROWS

    def clear(self) -> None:
        self._steps.clear()
        self.rows = 0

    def add(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """The pool and the verdict must not change any more; the slots may."""
        held = (getattr(slots, name).clone() for name in _Slots._fields)
        self._steps.append((pool, _Slots(*held), verdict))
        self.rows += max(pool.rows, slots.count)

    def observe(self, slots: Slots, config: GraphConfig, ops: Ops) -> Observed:
        """What they have shown of groups that are still there; no step waits after this.

        All steps are observed as one, in which each has slots and groups of its own.
        """
        pools, before, verdicts = zip(*self._steps, strict=True)
        S, G, made = slots.count, slots.group_key.shape[0], []
        row = 0
        for i, (pool, old, verdict) in enumerate(self._steps):
            slot = torch.where(pool.slot >= 0, pool.slot + i * S, -1)
            group = torch.where(old.group >= 0, old.group + i * G, -1)
            accept_row = torch.where(verdict.accept_row >= 0, verdict.accept_row + row, -1)
            made.append((slot, group, accept_row))
            row += pool.rows
        slot, group, accept_row = map(torch.cat, zip(*made, strict=True))
        key = _joined(before, "group_key")
        key = torch.where(torch.isin(key, slots.group_key), key, -1)
        self.clear()
        return ops.observe(
            _Pool(slot, _joined(pools, "depth"), _joined(pools, "context")),
            _Slots(group, _joined(before, "sample"), key, _joined(before, "step")),
            _Verdict(*(_joined(verdicts, name) for name in _Verdict._fields[:3]), accept_row),
            config,
        )


def _joined(records: Any, name: str) -> torch.Tensor:
    return torch.cat([getattr(record, name) for record in records])
