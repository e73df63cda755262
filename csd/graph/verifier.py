"""Interface between a step and a verifier that proposes its own drafts."""

from typing import Any, Protocol

import torch

from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict


class Verifier(Protocol):
    """Proposes a step's pool and verifies it, in place of the drafter and of matching.

    verifies_any_pool: True if `verify` takes pools with more nodes of a slot than it has proposed.
    """

    verifies_any_pool: bool

    def propose(self, slots: Slots, live_count: int, nodes: int, budget: Any) -> Pool:
        """Returns the roots of the live slots and at most `nodes` drafted nodes."""

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """Returns the samples, accepted paths and ends of the pool; logits: [M, V]."""
