"""Proposal and verification of a step with a multi-draft scheme (`csd/engine/step/step.py`)."""

from typing import Any

import torch

from csd.graph.model.drafter import ModelDrafter
from csd.graph.model.sequences import Sequences
from csd.graph.sampled_tree import Drawn, SampledTrees
from csd.kernels.ops import Ops
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.verify import make_scheme
from csd.verify.descend import descend

# verifier -> number of drafts per node
DRAWS = {"canonical": 2, "recursive": 2, "kseq": 2, "single": 1}


class MultiDraftVerifier:
    """Draft trees of random draws, and their verification by one scheme.

    name: one of DRAWS. drafter: the proposal, a consensus graph or a draft model alone. ops: the
    engine's. draws: number per node of a graph; a draft model has its own.
    """

    def __init__(self, name: str, drafter: Any, ops: Ops, draws: int | None = None):
        self.scheme, self._ops = make_scheme(name), ops
        if isinstance(drafter, ModelDrafter):
            self._check_model(name, drafter)
            device, self.draws = drafter.prefill.device, 1 if name == "single" else drafter.k
            self._trees: Any = Sequences(drafter, self.draws)
        elif hasattr(drafter, "table"):
            device, self.draws = drafter.table.step.device, draws or DRAWS[name]
            self._trees = SampledTrees(drafter, ops.draft_tree, self.draws)
        else:
            raise ValueError(
                f"verifier {name!r} draws from a known proposal: drafter must be 'consensus' or a "
                f"csd.DraftModel, got {type(drafter).__name__}"
            )
        if device.type != "cpu":
            raise NotImplementedError(
                f"verifier {name!r} runs on CPU only; on {device} use 'match'"
            )
        self._drawn = Drawn([], [])

    def _check_model(self, name: str, drafter: ModelDrafter) -> None:
        if drafter.graph is not None:
            raise ValueError(
                f"verifier {name!r} draws from one proposal: graph must be False in {drafter.name}"
            )
        several = isinstance(drafter.temperature, tuple)
        if several and self.scheme.same_proposals:
            raise ValueError(
                f"verifier {name!r} needs drafts of one distribution: temperature must be one "
                f"number in {drafter.name}, got {drafter.temperature}"
            )

    def propose(self, slots: Slots, live_count: int, nodes: int, budget: Any) -> Pool:
        """Draw the step's pool, with at most `nodes` drafts.

        The proposals are stored for `verify`.
        """

        def choose(costs: list[int]) -> int:
            return budget.select(live_count, costs)

        pool, self._drawn = self._trees.grow(slots, live_count, nodes, choose)
        if nodes:
            budget.record_selection(len(self._drawn.nodes) - live_count)
        return pool

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """Verify the step's pool: top 8 of every row, and the scheme's tokens on the paths."""
        verdict = self._ops.verify_all(logits, pool, slots)
        return descend(self.scheme, self.draws, logits, pool, self._drawn, slots, verdict)
