"""One step: propose, forward, verify, commit, insert."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from csd.engine.budget import Budget
from csd.engine.logit_changes import Changes
from csd.engine.step_record import PendingRecord, Record, Snapshot
from csd.engine.top_logprobs import Measures
from csd.graph.drafter import Drafter
from csd.kernels.layer_attention import LayerAttention, PromptAttention
from csd.kernels.layer_states import StepStates, commit_states
from csd.kernels.ops import Ops
from csd.kernels.prompt_rows import PromptChunk, PromptRows
from csd.kernels.prompt_states import PromptStates
from csd.models.config import scale_of
from csd.models.decoder import DecoderLike
from csd.models.joint_prefill import by_chunks, reads_together
from csd.state.kv_cache import KVCache
from csd.state.pool import Pool
from csd.state.preparation_phases import KINDS, preparation
from csd.state.slots import Slots
from csd.state.verdict import Verdict
from csd.verify.multi_draft import MultiDraftVerifier
from csd.verify.teacher_forcing import TeacherForcing

PHASES = ("propose", "forward", "verify", "commit", "insert")


@dataclass(slots=True)
class Step:
    """Runs decoding steps over the cache and slots of an engine, and reads prompts into them.

    Each call of an engine has a step of its own over the same memory.
    """

    # keys of `seconds`, in addition to "prefill" and KINDS
    phases: ClassVar[tuple[str, ...]] = PHASES
    static: ClassVar[bool] = False  # True if a step reads nothing on the host

    decoder: DecoderLike
    drafter: Drafter | None  # None if `drafting` is false
    cache: KVCache
    slots: Slots
    ops: Ops
    verifier: MultiDraftVerifier | TeacherForcing | None = None  # None: accept drafts that match
    changes: Changes | None = None  # set if a sample has options that change logits
    drafting: bool = True  # if False, the drafter is neither called nor updated
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

    def __call__(self, live: int, budget: Budget) -> Snapshot:
        """Run one step over `live` live slots; returns the snapshot that the host reads."""
        clock = Clock(self.seconds)
        pool = self.propose(live, budget)
        clock.lap("propose")
        logits = self.forward(pool)
        clock.lap("forward")
        verdict, snapshot = self.verify(logits, pool)
        clock.lap("verify")
        self.commit(verdict)
        clock.lap("commit")
        self.insert(pool, verdict, pool.rows > live)
        clock.lap("insert")
        return snapshot

    def live_slots(self, owned: int) -> int:
        """Number of slots that run in the next step; owned: slots with samples on the host."""
        return int(self.slots.live.sum())

    def launch(self, live: int, budget: Budget, owners: Iterable, step: int) -> PendingRecord:
        """Run a step; `owners` holds each slot's sample, `step` counts from 1."""
        before, self.waited = dict(self.seconds), 0.0
        snapshot = self(live, budget)
        took = {phase: self.seconds[phase] - before[phase] for phase in self.phases}
        pending = PendingRecord.of(snapshot, owners, step)
        pending.draft_seconds = took["propose"] + took["insert"] - self.waited
        pending.model_seconds = took["forward"] + took["verify"] + took["commit"]
        return pending

    def read(self, pending: PendingRecord) -> Record:
        """Read the record of a launched step on the host."""
        return pending.read()

    def propose(self, live: int, budget: Budget) -> Pool:
        """Propose the draft trees of all live slots, in one pool."""
        pool, nodes = self._drafted(live, budget)
        if self.changes is None or self.verifier is not None or not self.drafting:
            return pool
        most = min(live + nodes, self.cache.rows)
        return self.changes.plan(pool, self.slots, most)

    def _drafted(self, live: int, budget: Budget) -> tuple[Pool, int]:
        """The pool, and the largest number of drafted nodes it could have had."""
        drafter = self.drafter if self.drafting else None
        nodes = budget.ask(live) if drafter else 0
        if drafter and nodes:
            start = time.perf_counter()
            drafter.flush(self.slots)
            self.waited = time.perf_counter() - start
        if self.verifier:
            return self.verifier.propose(self.slots, live, nodes, budget), nodes
        if not drafter or not nodes:
            if drafter:
                drafter.skip(self.slots)
            return self.ops.roots(self.slots, live), nodes
        pool = drafter.propose(self.slots, live + nodes)
        cost, costs, penalties = self.ops.node_costs(pool, self.slots)
        keep = budget.choose(live, costs, penalties)
        budget.keep(keep)
        return self.ops.prune(pool, live + keep, cost), nodes

    def forward(self, pool: Pool) -> torch.Tensor:
        """Run the model over the pool; returns logits [M, V]."""
        cache, slots = self.cache, self.slots
        where = dict(
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
        config = self.decoder.config
        work = self.ops.plan_attention(heads=config.heads, kv_heads=config.kv_heads, **where)
        node_k, node_v = cache.nodes(pool.rows)
        attend = LayerAttention(
            self.ops.tree_attention, node_k, node_v, cache.k, cache.v, where, work,
            scale_of(config), plan=self.ops.plan_attention,
            works={(config.heads, config.kv_heads, None, None): work},
            states=cache.states and StepStates.of(self.ops, cache.states.slots, pool),
        )  # fmt: skip
        hidden = self.ops.forward(self.decoder, pool.token, pool.position, attend, node_k, node_v)
        self.observe_hidden(hidden)
        return self.decoder.logits(hidden)

    @property
    def reads_together(self) -> bool:
        """True if `read_prompts` may be given chunks of several prompts."""
        cache = self.cache
        return cache.reach is None and cache.states is None and reads_together(self.decoder)

    def read_prompt(self, g: int, chunk: list[int], start: int) -> torch.Tensor:
        """Write keys and values of a prompt's tokens from `start` on to the pages of group g.

        Returns the last hidden states, which the head would read.
        """
        return self.read_prompts([PromptChunk(g, chunk, start)])[0]

    def read_prompts(self, parts: Sequence[PromptChunk]) -> list[torch.Tensor]:
        """`read_prompt` for several prompts in one pass; keys and values have the same bits."""
        cache = self.cache
        decoder: Any = self.decoder
        rows = PromptRows.of(parts, cache.prompt_pages)
        node_k, node_v = cache.nodes(rows.token.shape[0])
        states = None
        if cache.states is not None:
            ((g, _, start),) = parts
            memory = cache.states.of_prompt(g, start)
            states = PromptStates(self.ops, memory, start, rows.token.shape[0])
        together = self.reads_together
        attend = PromptAttention(
            self.ops.prompt_attention, node_k, node_v, cache.k, cache.v, rows,
            scale_of(decoder.config), states, late=together and rows.begin,
        )  # fmt: skip
        if together:
            decoder = by_chunks(decoder, rows.chunks.rows)
        hidden = decoder.forward(rows.token, rows.position, attend, node_k, node_v, self.ops)
        attend.end()
        if states is not None:
            states.end()
        # with a single prompt a module may return fewer rows, so these are not split
        return [hidden] if len(parts) == 1 else list(hidden.split(rows.chunks.rows))

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        """Pass the hidden states of the pool's rows, or of a prompt's chunk, to the drafter."""
        if self.drafting and self.drafter is not None:
            self.drafter.observe_hidden(hidden)

    def verify(self, logits: torch.Tensor, pool: Pool) -> tuple[Verdict, Snapshot]:
        """Sample the rows, follow the accepted paths, and append their tokens to the slots."""
        ops = replace(self.ops, verify=self.verifier.verify) if self.verifier else self.ops
        asked = logits, pool, self.slots, self.top, self.trees
        if self.changes is None:
            verdict, *snapshot = ops.decide(*asked)
        else:
            verdict, *snapshot = self.changes.decide(ops, *asked)
        more = None
        if self.measures:
            more = self.measures.of(logits, verdict, self.static)
        return verdict, Snapshot.of(
            pool, verdict, (snapshot[0], snapshot[1]), self.top, self.trees, more
        )

    def commit(self, verdict: Verdict) -> None:
        """Append the keys, values and states of accepted nodes to those of their slots."""
        cache = self.cache
        for part in cache.parts:
            self.ops.commit_kv(
                part.node_k,
                part.node_v,
                part.k,
                part.v,
                cache.slot_pages,
                self.slots.generated,
                verdict.accept_row,
                verdict.accept_count,
                True,  # `generated` already includes the accepted tokens
            )
        if cache.states is not None:
            slots = self.slots
            # a free slot has no group, and accepts nothing
            length = slots.prompt_len[slots.group.clamp(min=0).long()] + slots.generated
            commit_states(
                self.ops, cache.states.slots, length, verdict.accept_row, verdict.accept_count
            )

    def insert(self, pool: Pool, verdict: Verdict, drafted: bool = True) -> None:
        """Insert the new n-grams and the target's top 8 at the nodes into the graph."""
        if self.drafting and self.drafter is not None:
            self.drafter.insert(pool, self.slots, verdict, defer=not drafted)


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
