"""A step's propose and verify where drafts are drawn, as `csd/engine/step.py` calls them."""

from typing import Any

import torch

from csd.graph.sampled_tree import Drawn, SampledTrees
from csd.kernels.ops import Ops
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.verify import make_scheme
from csd.verify.descend import descend

# verifier -> drafts of a node
DRAWS = {"canonical": 2, "recursive": 2, "kseq": 2, "single": 1}


class Sampler:
    """Grows trees of draws and descends them under one scheme.

    name: one of DRAWS. drafter: what the draws come from; it must have a graph. ops: of the engine.
    """

    def __init__(self, name: str, drafter: Any, ops: Ops, draws: int | None = None):
        if not hasattr(drafter, "table"):
            raise ValueError(
                f"verifier {name!r} draws from the consensus graph: drafter must be 'consensus', "
                f"got {type(drafter).__name__}"
            )
        if drafter.table.step.device.type != "cpu":
            raise NotImplementedError(
                f"verifier {name!r} runs on CPU only; on {drafter.table.step.device} use 'match'"
            )
        self.scheme, self.draws, self._ops = make_scheme(name), draws or DRAWS[name], ops
        self._trees = SampledTrees(drafter, ops.draft_tree, self.draws)
        self._drawn = Drawn([], [])

    def propose(self, slots: Slots, live: int, budget: Any) -> Pool:
        """The pool of the step; what it was drawn from is kept for `verify`."""
        nodes = budget.ask(live)

        def choose(costs: list[int]) -> int:
            return budget.choose(live, costs)

        pool, self._drawn = self._trees.grow(slots, live, nodes, choose)
        if nodes:
            budget.keep(len(self._drawn.nodes) - live)
        return pool

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """As `csd.kernels.verify`: its top 8 at every row, and the scheme's tokens on the way."""
        verdict = self._ops.verify(logits, pool, slots)
        return descend(self.scheme, self.draws, logits, pool, self._drawn, slots, verdict)
