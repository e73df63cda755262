"""Updates of steps without drafts, which wait until the graph is read again.

A step without drafts then takes what it takes without a graph, and many updates together take
little more than one.
"""

from dataclasses import replace

import torch

from csd.kernels.observe import Observed
from csd.kernels.ops import Ops
from csd.state.context_table import GraphConfig
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# rows of all waiting steps at most; observing takes memory by their square
MOST_ROWS = 256
# what `observe` reads of slots, which go on changing
HELD = ("group", "sample", "group_key", "step")


class DeferredInserts:
    """The waiting steps."""

    def __init__(self) -> None:
        self._steps: list[tuple[Pool, dict[str, torch.Tensor], Verdict]] = []
        self.rows = 0

    @property
    def full(self) -> bool:
        return self.rows >= MOST_ROWS

    def clear(self) -> None:
        self._steps.clear()
        self.rows = 0

    def add(self, pool: Pool, slots: Slots, verdict: Verdict) -> None:
        """The pool and the verdict must not change any more; the slots may."""
        held = {name: getattr(slots, name).clone() for name in HELD}
        self._steps.append((pool, held, verdict))
        self.rows += max(pool.rows, slots.count)

    def observe(self, slots: Slots, config: GraphConfig, ops: Ops) -> Observed:
        """What they have shown of groups that are still there; no step waits after this.

        All steps are observed as one, in which each has slots and groups of its own.
        """
        S, G, row = slots.count, slots.group_key.shape[0], 0
        made = []
        for i, (pool, held, verdict) in enumerate(self._steps):
            made.append({
                "slot": torch.where(pool.slot >= 0, pool.slot + i * S, -1),
                "depth": pool.depth,
                "context": pool.context,
                "group": torch.where(held["group"] >= 0, held["group"] + i * G, -1),
                "sample": held["sample"],
                "group_key": held["group_key"],
                "step": held["step"],
                "drawn": verdict.sample,
                "top_token": verdict.top_token,
                "top_prob": verdict.top_prob,
                "accept_row": torch.where(verdict.accept_row >= 0, verdict.accept_row + row, -1),
            })  # fmt: skip
            row += pool.rows
        x = {name: torch.cat([each[name] for each in made]) for name in made[0]}
        key = torch.where(torch.isin(x["group_key"], slots.group_key), x["group_key"], -1)
        pool, _, verdict = self._steps[-1]
        self.clear()
        # only what is replaced is read
        return ops.observe(
            replace(pool, slot=x["slot"], depth=x["depth"], context=x["context"]),
            replace(
                slots, live=x["group"] >= 0, group=x["group"], sample=x["sample"],
                group_key=key, step=x["step"],
            ),
            replace(
                verdict, sample=x["drawn"], top_token=x["top_token"], top_prob=x["top_prob"],
                accept_row=x["accept_row"],
            ),
            config,
        )  # fmt: skip
