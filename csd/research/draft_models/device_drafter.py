"""Draft trees of a draft model or a head on the device, in fixed shapes, for static steps.

The trees equal those of `drafter.py` for a network alone. Every live slot has the same number of
candidates; absent ones have probability 0 and never enter the pool, which `pool_of_drafted` fills
with the likeliest nodes of all slots. The `k` likeliest nodes of each slot's level are read
regardless of their probability, up to 63 per slot.
"""

from dataclasses import dataclass
from typing import Any

import torch

from csd.graph.drafter import StaticDrafter
from csd.kernels.draft.sample_words import sample_words, sample_words_ref, sample_words_triton
from csd.kernels.ops import Ops
from csd.models.fused.decoder import DecoderLike
from csd.research.draft_models.cache import MAX_ROWS, DraftNetwork
from csd.research.draft_models.device_cache import DeviceCache
from csd.research.draft_models.distributions import (
    DeviceReliability,
    distribution_tensors,
    expected_tensors,
)
from csd.research.draft_models.drafter import NetworkDrafter
from csd.research.draft_models.slots import SlotOrder
from csd.state.kv_cache import KVCache
from csd.state.pool import COST_ONE, MAX_NODES, MODEL, Pool
from csd.state.pool_builder import Nodes, pool_of, progress_penalties, roots
from csd.state.slots import Slots
from csd.state.verdict import Verdict

# largest cost of a path, as on the host
MAX_NODE_COST = 16 * COST_ONE


@dataclass(slots=True)
class Drafted:
    """C candidates per slot, level by level; slots in the order of a `SlotOrder`."""

    token: torch.Tensor  # [S, C] int32
    parent: torch.Tensor  # [S, C] int64, number of the parent, -1 below the root
    chance: torch.Tensor  # [S, C] float64, probability of the path; 0 where there is no node
    estimate: torch.Tensor  # [S, C] float64, the model's estimate of the token
    levels: list[int]  # number of candidates per level; their sum is C


def pool_of_drafted(
    drafted: Drafted, order: SlotOrder, slots: Slots, rows: int, nodes: int | None
) -> tuple[Pool, torch.Tensor]:
    """Select at most `nodes` nodes into a pool of `rows` rows, at least as many as live slots.

    Returns the pool, and the estimates of each slot's sorted nodes [S, 1 + n] float64, the root's
    first; the pool holds a prefix of each slot's list.

    Nodes are ordered by path cost plus the slot's progress penalty; ties keep their order. So a
    parent comes before its children, and a slot's selected nodes are a prefix of its list.
    """
    device, S, C = slots.live.device, *drafted.token.shape
    # infinite where there is no node
    cost = -drafted.chance.log2() * COST_ONE
    penalty = progress_penalties(slots)[order.slot].double()[:, None]
    # sort within each slot, then over all slots
    key, number = (cost + penalty).sort(dim=1, stable=True)
    width = min(C, MAX_NODES - 1)
    rank = torch.empty(S * width, dtype=torch.int64, device=device)
    flat = key[:, :width].reshape(-1)
    every = torch.arange(S * width, device=device)
    rank[flat.argsort(stable=True)] = every
    room = rows - order.live.sum()
    limit = room if nodes is None else room.clamp(max=nodes)
    keep = (rank < limit) & (flat < torch.inf)
    every = torch.arange(C, device=device).expand(S, C)
    by_number = torch.empty_like(number).scatter_(1, number, every)
    chosen = number[:, :width]
    above = drafted.parent.gather(1, chosen)
    below = by_number.gather(1, above.clamp(min=0)).clamp(max=width - 1)
    below += torch.arange(S, device=device)[:, None] * width
    levels = [torch.full((n,), i, device=device) for i, n in enumerate(drafted.levels, 1)]
    nodes_of_pool = Nodes(
        cost=cost.gather(1, chosen).clamp(max=MAX_NODE_COST).round(),
        token=drafted.token.gather(1, chosen),
        slot=torch.where(keep.view(S, width), order.slot[:, None], -1),
        depth=torch.cat(levels)[chosen],
        parent=torch.where(above < 0, -1, below),
        source=torch.full((S, width), MODEL, device=device),
    )
    pool = pool_of(slots, rows, Nodes(*(x.reshape(-1) for x in nodes_of_pool)))
    estimate = torch.ones(S, 1 + width, dtype=torch.float64, device=device)
    estimate[order.slot, 1:] = drafted.estimate.gather(1, chosen)
    return pool, estimate


WORDS = {"reference": sample_words_ref, "triton": sample_words_triton}


class DeviceModelDrafter(NetworkDrafter, StaticDrafter):
    """Drafter of a network on the device. settings: as in `NetworkDrafter`, without a
    tuple of temperatures."""

    def __init__(self, net: DraftNetwork, ops: Ops, device: str | torch.device, **settings: Any):
        super().__init__(net, ops, device, **settings)
        self.reliability = DeviceReliability(self.device)
        self.cache: DeviceCache | None = None
        # the public operator dispatches by device
        self._words = WORDS.get(ops.name, sample_words)
        # [S, 1 + n], estimates of the running step's nodes, by slot; None without drafts
        self._estimate: torch.Tensor | None = None
        # [M, hidden], the target's states of the rows that it read last, if a head uses them
        self._hidden: torch.Tensor | None = None

    def attach(self, decoder: DecoderLike, cache: KVCache) -> None:
        super().attach(decoder, cache)
        self.cache = DeviceCache(self.net, self.ops, cache, self.depth + 1, self.device)

    def start_call(self) -> None:
        self.net.start_call()
        self.reliability.forget()

    def observe_prompt(
        self, group_key: int, prompt: list[int], observed: int, read: int, slots: Slots
    ) -> int:
        """Read the prompt up to the target's position, without its last token."""
        assert self.cache is not None, "attach was not called"
        end = min(read, len(prompt) - 1)
        self.cache.read_prompt(group_key, prompt, observed, end, slots, self._hidden)
        return end

    def observe_hidden(self, hidden: torch.Tensor) -> None:
        if self.net.wants_hidden:
            self._hidden = self.net.states(hidden)

    def skip(self, slots: Slots) -> None:
        """For a head, read committed tokens, since their states are stored for one step only."""
        if self.net.wants_hidden:
            assert self.cache is not None, "attach was not called"
            self.cache.read(SlotOrder.of(slots), slots)

    def propose(
        self, slots: Slots, rows: int, noise: object = None, *, nodes: int | None = None
    ) -> Pool:
        """Draft trees of all live slots, in `rows` rows. Uses the slots' own noise, not `noise`."""
        assert self.cache is not None, "attach was not called"
        self._estimate = None
        if nodes == 0:
            self.skip(slots)
            return roots(slots, rows)
        order = SlotOrder.of(slots)
        pool, self._estimate = pool_of_drafted(self._grow(order, slots), order, slots, rows, nodes)
        return pool

    def _grow(self, order: SlotOrder, slots: Slots) -> Drafted:
        cache = self.cache
        assert cache is not None
        hidden, ready = cache.read(order, slots)
        S, device = ready.shape[0], self.device
        generated = slots.generated[order.slot]
        room = (slots.max_new - 1 - slots.generated)[order.slot]
        position = cache.base(slots)[order.group] + generated
        # number of nodes that each level reads: `k`, until there is no more room
        reads = [min(self.k, MAX_ROWS - d * self.k) for d in range(self.depth - 1)]
        reads = [n for n in reads if n > 0]
        nodes = cache.nodes(max(sum(reads), 1))
        # the front: numbers, ancestor words and path probabilities of the nodes to expand
        number = torch.full((S, 1), -1, dtype=torch.int64, device=device)
        word, chance = torch.zeros_like(number), ready.double()[:, None]
        hidden, levels, parts, begin = hidden[:, None], [], [], 0
        for depth in range(1, min(self.depth, len(reads) + 1) + 1):
            token, estimate = self._children(hidden, generated + depth - 1, order, slots)
            path = chance[..., None] * self.reliability(estimate) * (estimate > 0)
            path = path * (room >= depth)[:, None, None]
            F, width = token.shape[1:]
            above = number[..., None].expand(S, F, width)
            level = [x.reshape(S, F * width) for x in (token, above, path, estimate)]
            parts.append(level)
            levels.append(F * width)
            if depth > len(reads):
                break
            # stable: ties keep their order
            best = (-level[2]).argsort(dim=1, stable=True)[:, : reads[depth - 1]]
            parent = best // width
            row = torch.arange(S, device=device)[:, None] * F + parent
            states = hidden.flatten(0, 1)[row]
            hidden = cache.read_level(
                order,
                nodes,
                level[0].gather(1, best),
                word.gather(1, parent),
                position + depth,
                states,
                slots,
            )
            word = nodes.words[:, -best.shape[1] :]
            number, chance = begin + best, level[2].gather(1, best)
            begin += F * width
        token, above, path, estimate = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return Drafted(token.int(), above, path, estimate, levels)

    def _children(
        self, hidden: torch.Tensor, position: torch.Tensor, order: SlotOrder, slots: Slots
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and estimates [S, F, k] of the `k` likeliest children of nodes [S, F].

        hidden: [S, F, hidden]; position: [S], the index of the next token.
        """
        S, F = hidden.shape[:2]
        slot = order.slot[:, None].expand(S, F).reshape(-1)
        logits = self.net.logits(hidden.flatten(0, 1))
        token, log = distribution_tensors(logits, slot, slots, self.temperature)
        positions = position[:, None].expand(S, F).reshape(-1)
        word = self._words(
            slots.key, slots.sample, slot.int(), positions.int().contiguous(), token.int()
        )
        chance = expected_tensors(log, word, slots.temperature[slot] <= 0)
        # tokens that end the sample are never drafted
        ends = (token[..., None] == slots.stop_ids[slot][:, None]).any(2)
        chance = torch.where(ends, 0, chance)
        best = (-chance).argsort(dim=1, stable=True)[:, : self.k]
        return token.gather(1, best).view(S, F, -1), chance.gather(1, best).view(S, F, -1)

    def insert(self, pool: Pool, slots: Slots, verdict: Verdict, defer: bool = False) -> None:
        """Update the reliability with the nodes whose parent was reached; for a head, store the
        target's states."""
        if self.net.wants_hidden:
            assert self.cache is not None and self._hidden is not None
            self.cache.keep(self._hidden, verdict.accept_row)
        if self._estimate is None:
            return
        rows, path = pool.rows, verdict.accept_row
        step = torch.arange(path.shape[1], device=path.device)
        row = torch.where(step < verdict.accept_count[:, None], path, rows).long()
        reached = torch.zeros(rows + 1, dtype=torch.bool, device=path.device)
        reached.index_fill_(0, row.reshape(-1), True)
        tested = (pool.depth > 0) & reached[pool.parent.clamp(min=0).long()]
        s = pool.slot.clamp(min=0).long()
        node = torch.arange(rows, device=path.device) - pool.slot_start[s]
        estimate = self._estimate[s, node.clamp(0, self._estimate.shape[1] - 1)]
        self.reliability.learn(estimate, tested, reached[:rows])
