"""Interfaces between a step and a drafter, or a verifier that proposes its own drafts."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from csd.graph.history import PastSample
from csd.graph.prior import Prior
from csd.kernels.ops import Ops
from csd.state.kv_cache import KVCache
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict


class Drafter:
    """Base of all drafters. An engine uses one for many calls."""

    context: int = 1  # tokens of context that `Slots` must keep
    # True if groups with different prompts may have one key, and then draft for each other
    shares_keys: bool = False
    # True if `insert` takes pools with other nodes than those that it has proposed
    inserts_any_pool: bool = False
    prior_contexts: int = 0  # capacity of each part of its prior's table, 0 without one
    prior_parts: int = 1

    def suits(self, tokens: int, history: bool) -> bool:
        """True if the drafter is fit for a call with `tokens` tokens of prompts and samples.

        tokens: those of past samples included. history: whether there are past samples.
        """
        return True

    def max_history(self, history: Sequence[PastSample], groups: int) -> int | None:
        """Number of a prompt's past samples that fit, with `groups` groups in flight.

        None if the drafter does not draft from history.
        """
        return None

    @property
    def dropped(self) -> torch.Tensor | None:
        """[1] int64: number of dropped contexts so far; None if nothing is ever dropped."""
        return None

    @property
    def reads_hidden(self) -> bool:
        """True if it needs the target's hidden states of all tokens of a prompt, which are then
        all read by the target."""
        return type(self).observe_hidden is not Drafter.observe_hidden

    def cache_bytes(self, pages: int) -> int:
        """Bytes of the drafter's own keys and values for `pages` pages of the target's cache."""
        return 0

    def attach(self, decoder: Any, cache: KVCache) -> None:
        """Attach to the target and its cache, once, before the first prompt.

        Raises ValueError if its vocabulary does not fit the target's.
        """

    def use_prior(self, prior: Prior | None, part: int = 0) -> None:
        """Draft from the current contexts of a prior with `prior_contexts` contexts, until the next
        call of this method; None for a drafter without one.

        part: of the prior's table, for groups that read this part (`Slots.prior_part`).
        """

    def start_call(self) -> None:
        """Start a call, with the state of a new drafter: nothing learned from previous texts."""

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Observe a new group's prompt, after each chunk and once more after all of it.

        observed: the result of the previous call, 0 at first. read: tokens of the prompt that the
        target has read. Returns the tokens that the drafter has processed; a drafter may process a
        part per call, or all of the prompt in the last one.
        """
        raise NotImplementedError

    def enter_history(
        self, group_key: int, prompt: list[int], history: Sequence[PastSample], slots: Slots
    ) -> Iterator[int]:
        """Enter past samples of a new group's prompt, after the whole prompt.

        Each `next` enters a piece and returns its rows, so that steps can run in between.
        """
        raise NotImplementedError

    def propose(self, slots: Slots, rows: int) -> Pool:
        """Draft trees of all live slots in at most `rows` rows, roots included."""
        raise NotImplementedError

    def skip(self, slots: Slots) -> None:
        """Called in place of `propose` in a step without drafts."""

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        """Observe the target's last hidden states [M, hidden] of a step's rows or a prompt's chunk.

        A chunk's states come before its `observe_prompt`.
        """

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Insert a step's verdict; the slots have advanced.

        defer: the step had no drafts, and the insert may wait until `flush`.
        """
        raise NotImplementedError

    def flush(self, slots: Slots) -> None:
        """Insert all deferred steps. Called before each `propose`; not counted as drafting time."""


class StaticDrafter(Drafter):
    """A drafter of fixed shapes that never reads the device, for static steps.

    nodes: most drafted nodes; the other `rows` are padding.
    """

    def propose(
        self, slots: Slots, rows: int, noise: Any = None, *, nodes: int | None = None
    ) -> Pool:
        raise NotImplementedError


class DraftSpec:
    """Settings of a drafter: `drafter=` of `csd.generate` takes an instance of a subclass."""

    def make(
        self, ops: Ops, device: str | torch.device, tokens: int = 0, history: bool = False
    ) -> Drafter:
        """Make a drafter; tokens, history: as in `Drafter.suits`."""
        raise NotImplementedError

    def __call__(self, ops: Ops, device: str | torch.device) -> Drafter:
        return self.make(ops, device)


class Verifier(Protocol):
    """Proposes a step's pool and verifies it, in place of the drafter and of matching.

    verifies_any_pool: True if `verify` takes pools with more nodes of a slot than it has proposed.
    """

    verifies_any_pool: bool

    def propose(self, slots: Slots, live_count: int, nodes: int, budget: Any) -> Pool:
        """Returns the roots of the live slots and at most `nodes` drafted nodes."""

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """Returns the samples, accepted paths and ends of the pool; logits: [M, V]."""
