"""One step: propose, forward, verify, commit, insert."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from csd.cache import KVCache
from csd.device import upload
from csd.kernels.chunk_attention import chunk_attention
from csd.kernels.commit import write_prompt
from csd.kernels.ops import Ops
from csd.models.decoder import DecoderLike
from csd.pool import Pool, roots, trim
from csd.slots import Slots
from csd.verdict import Verdict

if TYPE_CHECKING:
    from csd.verify.sampler import Sampler


@dataclass(slots=True)
class Step:
    """The state of an engine, the five functions over it, and the reading of a prompt."""

    decoder: DecoderLike
    # a csd.graph.drafter.Drafter; None until the first step, and where `drafting` is not
    drafter: Any
    cache: KVCache
    slots: Slots
    ops: Ops
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sampler: "Sampler | None" = None  # where drafts are drawn
    drafting: bool = True  # else the drafter is neither asked nor told anything

    def __call__(self, live: int, budget: Any) -> tuple[Pool, Verdict]:
        """Run one step over `live` live slots; returns what was drafted and what was decided."""
        clock = _Clock(self.seconds)
        pool = self.propose(live, budget)
        clock.lap("propose")
        logits = self.forward(pool)
        clock.lap("forward")
        verify = self.sampler.verify if self.sampler else self.ops.verify
        verdict = verify(logits, pool, self.slots)
        clock.lap("verify")
        self.commit(verdict)
        clock.lap("commit")
        self.insert(pool, verdict)
        clock.lap("insert")
        return pool, verdict

    def propose(self, live: int, budget: Any) -> Pool:
        """The draft trees of all live slots in one pool."""
        if self.sampler:
            return self.sampler.propose(self.slots, live, budget)
        nodes = budget.ask(live) if self.drafting else 0
        if not nodes:
            return roots(self.slots, live)
        pool = self.drafter.propose(self.slots, live + nodes)
        drafted = pool.depth > 0
        keep = budget.choose(live, pool.cost[drafted].tolist())
        budget.keep(keep)
        return trim(pool, live + keep)

    def forward(self, pool: Pool) -> torch.Tensor:
        """Logits [M, V] at every row of the pool."""
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
        scale = config.head_dim**-0.5
        node_k, node_v = cache.node_k[:, : pool.rows], cache.node_v[:, : pool.rows]

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return self.ops.tree_attention(
                q, node_k[layer], node_v[layer], cache.k[layer], cache.v[layer], **where,
                scale=scale, work=work,
            )  # fmt: skip

        hidden = self.decoder.forward(pool.token, pool.position, attend, node_k, node_v, self.ops)
        if self.drafting:
            self.drafter.see(hidden)
        return self.decoder.logits(hidden)

    def read_prompt(self, g: int, chunk: list[int], start: int) -> None:
        """Keys and values of a prompt's tokens from `start` on, into the pages of group g."""
        cache, rows, device = self.cache, len(chunk), self.slots.live.device
        tokens = upload(torch.tensor(chunk, dtype=torch.int32), device)
        position = torch.arange(start, start + rows, dtype=torch.int32, device=device)
        node_k, node_v = cache.node_k[:, :rows], cache.node_v[:, :rows]
        scale = self.decoder.config.head_dim**-0.5

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            k, v, pages = cache.k[layer], cache.v[layer], cache.prompt_pages[g]
            write_prompt(node_k[layer], node_v[layer], k, v, pages, start)
            return chunk_attention(q, k, v, pages, start, scale)

        self.decoder.forward(tokens, position, attend, node_k, node_v, self.ops)

    def commit(self, verdict: Verdict) -> None:
        """Accepted nodes' keys and values move behind the committed ones; slots move on."""
        cache = self.cache
        self.ops.commit_kv(
            cache.node_k, cache.node_v, cache.k, cache.v, cache.slot_pages,
            self.slots.generated, verdict.accept_row, verdict.accept_count,
        )
        self.ops.advance_slots(self.slots, verdict)

    def insert(self, pool: Pool, verdict: Verdict) -> None:
        """The new n-grams and the target's top 8 at every node go into the graph."""
        if self.drafting:
            self.drafter.insert(pool, self.slots, verdict)


class _Clock:
    def __init__(self, seconds: dict[str, float]):
        self._seconds = seconds
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now
