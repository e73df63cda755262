"""The source paper's method on the device: suffix matches, and the graph in layers, every step.

Nothing of it is kept from step to step but the texts (`csd.state.texts`): each step finds the
candidates of every live slot anew, makes their graph and extracts the drafts into the same pool as
the default's. Shapes are fixed and nothing is read back, so a static step can hold it.
"""

import torch

from csd.graph.drafter import StaticDrafter
from csd.kernels.layered_dag import layered_dag, layered_dag_ref, layered_dag_triton
from csd.kernels.ops import Ops
from csd.kernels.suffix_match import suffix_match, suffix_match_ref, suffix_match_triton
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.texts import DagConfig, Texts
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
        self.texts: Texts | None = None
        # the public operators take what fits the device
        self._match, self._extract = IMPLEMENTATIONS.get(ops.name, (suffix_match, layered_dag))

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Make room; the prompt's end is each slot's context when its sample begins."""
        if self.texts is None:
            self.texts = Texts.empty(slots.count, slots.tokens.shape[1], self.config.k, self.device)
        return read

    def propose(
        self, slots: Slots, rows: int, noise: object = None, *, nodes: int | None = None
    ) -> Pool:
        """Drafts of all live slots in `rows` rows, of at most `nodes` nodes. Noise is not used."""
        assert self.texts is not None, "observe_prompt was not called"
        config = self.config
        found = self._match(
            self.texts, slots, config.k, config.edits, config.candidates, config.tokens
        )
        return self._extract(found, slots, rows, config, nodes)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """The committed tokens, with the probabilities that the target drew them with."""
        assert self.texts is not None, "observe_prompt was not called"
        self.texts.append(pool, slots, verdict.accept_count, self.config.k)
