"""The source paper's method on the device: suffix matches and the layered graph in every step.

Only the texts (`csd.state.texts`) are stored from step to step: each step finds the candidates of
every live slot anew, makes their graph and extracts the drafts into the same kind of pool as the
default drafter's. Shapes are fixed and nothing is read on the host, so static steps can include it.
"""

import torch

from csd.graph.drafter import StaticDrafter
from csd.kernels.draft.paper.layered_dag import layered_dag, layered_dag_ref, layered_dag_triton
from csd.kernels.draft.paper.suffix_match import suffix_match, suffix_match_ref, suffix_match_triton
from csd.kernels.ops import Ops
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.texts import DagConfig, SlotTexts
from csd.state.verdict import Verdict

IMPLEMENTATIONS = {
    "reference": (suffix_match_ref, layered_dag_ref),
    "triton": (suffix_match_triton, layered_dag_triton),
}


class LayeredDag(StaticDrafter):
    """Drafts by "Speculative Decoding for Multi-Sample Inference" (arXiv 2503.05330)."""

    def __init__(self, ops: Ops, device: str | torch.device, config: DagConfig | None = None):
        self.config = config or DagConfig()
        self.context = self.config.k
        self.device = torch.device(device)
        self.texts: SlotTexts | None = None
        # the public operators choose the implementation by device
        self._match, self._extract = IMPLEMENTATIONS.get(ops.name, (suffix_match, layered_dag))

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Allocate the texts; the prompt's end is in each slot's context when its sample begins."""
        if self.texts is None:
            self.texts = SlotTexts.empty(
                slots.count, slots.tokens.shape[1], self.config.k, self.device
            )
        return read

    def propose(
        self, slots: Slots, rows: int, noise: object = None, *, nodes: int | None = None
    ) -> Pool:
        """Draft all live slots in `rows` rows, with at most `nodes` nodes. Noise is not used."""
        assert self.texts is not None, "observe_prompt was not called"
        config = self.config
        candidates = self._match(
            self.texts, slots, config.k, config.edits, config.candidates, config.tokens
        )
        return self._extract(candidates, slots, rows, config, nodes)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Append the committed tokens to the texts, with the target's probabilities of them."""
        assert self.texts is not None, "observe_prompt was not called"
        self.texts.append(pool, slots, verdict.accept_count, self.config.k)
