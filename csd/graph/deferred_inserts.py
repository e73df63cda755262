"""Deferred inserts: the updates of steps without drafts are inserted before the next read.

So a step without drafts is as fast as one without a graph, and one insert serves many steps.
"""

from dataclasses import replace

import torch

from csd.kernels.ops import Ops
from csd.kernels.table.rows import Observed
from csd.state.context_table import GraphConfig
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# most rows of all deferred steps; the memory of observation grows with their square
MAX_ROWS = 256
# slot fields that `observe` reads, copied because the slots change later
COPIED = ("group", "sample", "group_key", "step")


class DeferredInserts:
    """Steps whose insert is deferred."""

    def __init__(self) -> None:
        self._steps: list[tuple[Pool, dict[str, torch.Tensor], Verdict]] = []
        self.rows = 0

    @property
    def full(self) -> bool:
        return self.rows >= MAX_ROWS

    def clear(self) -> None:
        self._steps.clear()
        self.rows = 0

    def add(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """Defer a step. Its pool and verdict must not change afterwards; the slots may."""
        copied = {name: getattr(slots, name).clone() for name in COPIED}
        self._steps.append((pool, copied, verdict))
        self.rows += max(pool.rows, slots.count)

    def observe(self, slots: Slots, config: GraphConfig, ops: Ops) -> Observed:
        """Observe all deferred steps at once and clear them; rows of ended groups are left out.

        Each step gets slots and groups of its own in the combined one.
        """
        S, G, row = slots.count, slots.group_key.shape[0], 0
        parts = []
        for i, (pool, copied, verdict) in enumerate(self._steps):
            parts.append(
                {
                    "slot": torch.where(pool.slot >= 0, pool.slot + i * S, -1),
                    "depth": pool.depth,
                    "context": pool.context,
                    "group": torch.where(copied["group"] >= 0, copied["group"] + i * G, -1),
                    "sample": copied["sample"],
                    "group_key": copied["group_key"],
                    "step": copied["step"],
                    "drawn": verdict.sample,
                    "top_token": verdict.top_token,
                    "top_prob": verdict.top_prob,
                    "accept_row": torch.where(
                        verdict.accept_row >= 0, verdict.accept_row + row, -1
                    ),
                }
            )
            row += pool.rows
        x = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        key = torch.where(torch.isin(x["group_key"], slots.group_key), x["group_key"], -1)
        pool, _, verdict = self._steps[-1]
        self.clear()
        # only replaced fields are read
        return ops.observe(
            replace(pool, slot=x["slot"], depth=x["depth"], context=x["context"]),
            replace(
                slots,
                live=x["group"] >= 0,
                group=x["group"],
                sample=x["sample"],
                group_key=key,
                step=x["step"],
            ),
            replace(
                verdict,
                sample=x["drawn"],
                top_token=x["top_token"],
                top_prob=x["top_prob"],
                accept_row=x["accept_row"],
            ),
            config,
        )
