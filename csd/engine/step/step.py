"""One step: propose, forward, verify, commit, insert. `prefill.py` reads the prompts before it.

The proposal is a pool: the draft trees of all live slots, cut to the budget (`Step._draft`). Its
rows attend to the prompt's pages, the slot's pages and the pool's nodes (`pool_attention`). `Clock`
measures the seconds of the phases.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from csd.engine.results.logprobs import Measures
from csd.engine.results.record import PendingRecord, Record, Snapshot
from csd.engine.rules.changes import Changes
from csd.engine.step.budget import Budget
from csd.graph.drafter import Drafter, Verifier
from csd.kernels.attention.layer import LayerAttention
from csd.kernels.attention.prompt import PromptChunk
from csd.kernels.ops import Ops, TextOps
from csd.kernels.states import StepStates, commit_states
from csd.models.fused.config import ModelSizes, scale_of
from csd.models.fused.decoder import DecoderLike
from csd.state.kv_cache import KVCache
from csd.state.pool import COST_ONE, Pool, model_row
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.utils.phases import KINDS, preparation


class Clock:
    """Adds the time since the last lap to a phase's seconds; compiling and measuring meanwhile
    count as their own kinds."""

    def __init__(self, seconds: dict[str, float]):
        self._seconds = seconds
        self._last, self._prepared = time.perf_counter(), preparation()

    def lap(self, phase: str) -> None:
        now, prepared = time.perf_counter(), preparation()
        self._seconds[phase] += now - self._last
        for kind, seconds in prepared.items():
            self._seconds[kind] += seconds - self._prepared[kind]
            self._seconds[phase] -= seconds - self._prepared[kind]
        self._last, self._prepared = now, prepared


def pool_attention(
    ops: Ops, config: ModelSizes, cache: KVCache, slots: Slots, pool: Pool
) -> LayerAttention:
    """Returns the attention of the computed rows, which the decoder calls in each layer."""
    pool = pool.computed
    layout = dict(
        prompt_pages=cache.prompt_pages,
        prompt_len=slots.prompt_len,
        slot_pages=cache.slot_pages,
        slot_len=slots.generated,
        slot=pool.slot,
        ancestors=pool.ancestors,
        slot_start=pool.slot_start,
        slot_nodes=pool.slot_nodes,
        group_start=pool.group_start,
    )
    work = ops.plan_attention(heads=config.heads, kv_heads=config.kv_heads, **layout)
    node_k, node_v = cache.nodes(pool.rows)
    return LayerAttention(
        ops.tree_attention,
        node_k,
        node_v,
        cache.k,
        cache.v,
        layout,
        work,
        scale_of(config),
        plan=ops.plan_attention,
        works={(config.heads, config.kv_heads, None, None): work},
        states=cache.states and StepStates.of(ops, cache.states.slots, pool),
    )


# above the absolute cost of any node
MAX_SUM = 128 * COST_ONE


def _copied(trees: Pool, cost: torch.Tensor, first: torch.Tensor, most: int) -> int:
    """Number of cheapest nodes of class trees of which the members have at most `most` copies."""
    members = first[first >= 0].bincount(minlength=first.shape[0])
    drafted = (trees.depth > 0).nonzero()[:, 0]
    cheapest = drafted[cost[drafted].argsort(stable=True)]
    return int((members[trees.slot[cheapest].long()].cumsum(0) <= most).sum())


PHASES = ("propose", "forward", "verify", "commit", "insert")


@dataclass(slots=True)
class Step:
    """Runs decoding steps over the cache and slots of an engine.

    Each call of an engine has a step of its own over the same memory.
    """

    # keys of `seconds`, in addition to "prefill" and KINDS
    phases: ClassVar[tuple[str, ...]] = PHASES
    static: ClassVar[bool] = False  # True if the host reads nothing of a running step

    decoder: DecoderLike
    drafter: Drafter | None  # None if `drafting` is false
    cache: KVCache
    slots: Slots
    ops: Ops
    verifier: Verifier | None = None  # None: accept drafts that match
    changes: Changes | None = None  # set if a sample has options that change logits
    drafting: bool = True  # if False, the drafter is neither called nor updated
    share_rows: bool = True  # whether samples with equal text share rows of the model
    top: bool = False  # True: records hold the top 8 of committed tokens
    trees: bool = False  # True: records hold the draft trees
    measures: Measures = field(default_factory=Measures)  # further values that records hold
    seconds: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0  # seconds that the last step spent on deferred inserts of earlier steps

    def __post_init__(self) -> None:
        self.seconds = self.seconds or self.no_seconds()

    @classmethod
    def no_seconds(cls) -> dict[str, float]:
        return dict.fromkeys((*KINDS, "prefill", *cls.phases), 0.0)

    def __call__(self, live_count: int, budget: Budget) -> Snapshot:
        """Run one step over `live_count` live slots; returns the snapshot that the host reads."""
        clock = Clock(self.seconds)
        pool = self.propose(live_count, budget)
        clock.lap("propose")
        logits = self.forward(pool)
        clock.lap("forward")
        verdict, snapshot = self.verify(logits, pool)
        clock.lap("verify")
        self.commit(pool, verdict)
        clock.lap("commit")
        self.insert(pool, verdict, pool.rows > live_count)
        clock.lap("insert")
        return snapshot

    @property
    def sharing(self) -> TextOps | None:
        """The operations by which samples with equal text share rows; None if they do not.

        Verifiers other than the default one may draw other words for them, and a drafter may need
        the rows that it has proposed.
        """
        any_pool = self.drafter is None or not self.drafting or self.drafter.inserts_any_pool
        # not on a GPU: there are no kernels yet
        eager = not self.static and not self.slots.live.is_cuda
        if self.verifier is not None:
            # a rule would be asked about texts that are not a sample's own
            any_pool &= self.verifier.verifies_any_pool and self.changes is None
        shares = self.share_rows and eager and any_pool
        return self.ops.texts if shares else None

    def propose(self, live_count: int, budget: Budget) -> Pool:
        """Propose the draft trees of all live slots, in one pool."""
        drafter = self.drafter if self.drafting else None
        slots, texts, classes = self.slots, self.sharing, live_count
        if texts is not None:
            classes = int((texts.first(slots) == torch.arange(slots.count)).sum())
            texts = texts if classes < live_count else None
        most_nodes = 0 if drafter is None else budget.num_draft_tokens(classes)
        if drafter is not None and most_nodes:
            start = time.perf_counter()
            drafter.flush(slots)
            self.waited = time.perf_counter() - start
        if self.verifier is not None:
            pool = self.verifier.propose(slots, live_count, most_nodes, budget)
            return pool if texts is None else texts.share(pool, slots)
        pool = self._draft(drafter, texts, live_count, classes, most_nodes, budget)
        if self.changes is None or not self.drafting:
            return pool
        copies = pool.rows - pool.computed.rows
        most_rows = min(classes + most_nodes, self.cache.rows) + copies
        planned = self.changes.plan(pool, slots, most_rows)
        return planned if planned is pool or texts is None else texts.share(planned, slots)

    def _draft(
        self,
        drafter: Drafter | None,
        texts: TextOps | None,
        live_count: int,
        classes: int,
        most_nodes: int,
        budget: Budget,
    ) -> Pool:
        """Returns a pool with the roots of the live slots and the drafted nodes worth a row.

        drafter: None in a call without drafts. texts: None if no slots share rows. classes: number
        of different texts of the live slots, of which each has one tree (`csd/kernels/texts`).
        most_nodes: drafted nodes that `budget` asked for; it chooses how many of them to keep.
        """
        ops, slots = self.ops, self.slots
        if drafter is not None and most_nodes:
            # the members of a class draft many nodes in common
            pool = drafter.propose(slots, live_count + most_nodes * live_count // classes)
        else:
            pool = ops.roots(slots, live_count)
            if drafter is not None:
                drafter.skip(slots)
        trees = pool if texts is None else texts.merge(pool, slots)
        if most_nodes:
            cost, costs, penalties = ops.node_costs(trees, slots)
            count = min(budget.select(live_count, costs, penalties, classes), most_nodes)
            if texts is not None:
                # a node of several members may cost less than 0
                cost.masked_fill_(trees.depth == 0, -MAX_SUM)
                if self.changes is not None:
                    # rules edit a copy of each node's logits
                    count = min(count, _copied(trees, cost, texts.first(slots), most_nodes))
            budget.record_selection(count)
            trees = ops.prune(trees, classes + count, cost)
        return trees if texts is None else texts.spread(trees, pool, slots)

    def forward(self, pool: Pool) -> torch.Tensor:
        """Run the model over the pool's rows; returns logits [M, V], or [R, V] of `pool.texts`."""
        attend = pool_attention(self.ops, self.decoder.config, self.cache, self.slots, pool)
        rows = pool.computed
        hidden = self.ops.forward(
            self.decoder, rows.token, rows.position, attend, attend.node_k, attend.node_v
        )
        self.observe_hidden(hidden)
        return self.decoder.logits(hidden)

    def verify(self, logits: torch.Tensor, pool: Pool) -> tuple[Verdict, Snapshot]:
        """Sample the rows, follow the accepted paths, and append their tokens to the slots.

        `Ops.decide` (`csd/kernels/ops.py`) does these three; `Changes.decide` does so with logits
        that the options of samples have changed.
        """
        args = logits, pool, self.slots, self.top, self.trees
        changes, ops = self.changes, self.ops
        decided = ops.decide(*args) if changes is None else changes.decide(ops, *args)
        verdict, ints, floats = decided
        if texts := self.sharing:
            texts.part(self.slots, verdict)
        measured = None
        if self.measures:
            measured = self.measures.of(logits, model_row(pool, verdict.accept_row), self.static)
        return verdict, Snapshot.of(pool, verdict, (ints, floats), self.top, self.trees, measured)

    def commit(self, pool: Pool, verdict: Verdict) -> None:
        """Append the keys, values and states of accepted nodes to those of their slots.

        A row that several slots have accepted is copied to the pages of each.
        """
        cache, accept_row = self.cache, verdict.accept_row
        if pool.texts is not None:
            accept_row = model_row(pool, accept_row).int()
        for part in cache.parts:
            self.ops.commit_kv(
                part.node_k,
                part.node_v,
                part.k,
                part.v,
                cache.slot_pages,
                self.slots.generated,
                accept_row,
                verdict.accept_count,
                moved=True,  # `verify` has added the accepted tokens to `generated`
            )
        if cache.states is not None:
            slots = self.slots
            # a free slot has no group, and accepts nothing
            length = slots.prompt_len[slots.group.clamp(min=0).long()] + slots.generated
            commit_states(self.ops, cache.states.slots, length, accept_row, verdict.accept_count)

    def insert(self, pool: Pool, verdict: Verdict, drafted: bool = True) -> None:
        """Insert the new n-grams and the target's top 8 at the nodes into the graph."""
        if self.drafting and self.drafter is not None:
            self.drafter.insert(pool, self.slots, verdict, defer=not drafted)

    def prompt_pass(self, parts: Sequence[PromptChunk]) -> AbstractContextManager[None]:
        """Context of a pass over chunks of prompts (`prefill.py`), for subclasses."""
        return nullcontext()

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        """Pass the hidden states of the pool's rows, or of a prompt's chunk, to the drafter."""
        if self.drafting and self.drafter is not None:
            self.drafter.observe_hidden(hidden)

    def count_live(self, owned: int) -> int:
        """Number of slots that run in the next step; owned: slots with samples on the host."""
        return int(self.slots.live.sum())

    def launch(self, live_count: int, budget: Budget, owners: Iterable, step: int) -> PendingRecord:
        """Run a step; `owners` holds each slot's sample, `step` counts from 1."""
        before, self.waited = dict(self.seconds), 0.0
        snapshot = self(live_count, budget)
        took = {phase: self.seconds[phase] - before[phase] for phase in self.phases}
        drafting = took["propose"] + took["insert"] - self.waited
        model = took["forward"] + took["verify"] + took["commit"]
        return PendingRecord(
            list(owners), step, snapshot, draft_seconds=drafting, model_seconds=model
        )

    def read(self, pending: PendingRecord) -> Record:
        """Read the record of a launched step on the host."""
        return pending.read()
