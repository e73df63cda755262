"""Pairs of a real model's target and its graph's proposal, for `verify.py`."""

from dataclasses import dataclass, replace

import torch

import csd
from csd.graph.consensus import ConsensusGraph
from csd.graph.sampled_tree import successors
from csd.state.pool import MAX_CHILDREN
from csd.state.slots import Slots
from csd.verify.multi_draft import processed

SETTINGS = {
    "T=0.6": dict(temperature=0.6),
    "T=0.7": dict(temperature=0.7),
    "T=1.0": dict(temperature=1.0),
    "T=1.0, top-p 0.95": dict(temperature=1.0, top_p=0.95),
}
# number of noise keys under which each position is drafted
KEYS = 8


@dataclass(slots=True)
class Pairs:
    """Targets and proposals of n positions where the graph had a proposal.

    A proposal covers only a context's stored successors, so all other tokens are one atom, the
    last: none of them can be a draft, and every scheme treats them equally.
    """

    target: torch.Tensor  # [n, W + 1] float64
    proposal: torch.Tensor  # [n, W + 1] float64, normalised over the kept successors
    coupled: torch.Tensor | None  # [n, W] float64, share of keys that hit with K coupled drafts
    positions: int  # of all samples


class Recorder(ConsensusGraph):
    """Consensus graph that records its proposal and the target at each position."""

    def __init__(self, ops, device, logits: list):
        super().__init__(ops, device)
        self.logits, self.distributions, self.hits, self.positions = logits, [], [], 0

    def insert(self, pool, slots, verdict, defer=False) -> None:
        # slots have advanced since the step was verified
        slots_then = replace(slots, generated=slots.generated - verdict.accept_count)
        rows = (pool.slot >= 0).nonzero()[:, 0]
        self.positions += len(rows)
        targets = processed(self.logits[-1], rows, pool, slots_then).double()
        at, context = pool.slot[rows].tolist(), pool.context[rows].tolist()
        drafted = successors(self, self._ops.draft_tree, slots, at, context)
        hits = self._coupled(rows, pool, slots_then)
        for target, candidate, hit in zip(targets, drafted, hits, strict=True):
            if candidate.token:
                probs = torch.zeros(2, MAX_CHILDREN + 1, dtype=torch.float64)
                w = len(candidate.token)
                probs[0, :w], probs[1, :w] = target[candidate.token], torch.tensor(candidate.probs)
                probs[0, -1] = (1 - probs[0, :-1].sum()).clamp(min=0)
                self.distributions.append(probs)
                self.hits.append(hit)
        super().insert(pool, slots, verdict)

    def _coupled(self, rows, pool, slots) -> torch.Tensor:
        """Share of keys whose sample is among the K best coupled drafts, [n, W], for K = 1 to W."""
        at = pool.slot[rows].long()
        level = Slots.empty(len(rows), 1, 1, pool.context.shape[1])
        level.live.fill_(True)
        for name in ("group", "sample", "generated", "temperature", "stop_ids"):
            setattr(level, name, getattr(slots, name)[at])
        level.max_new, level.context = level.generated + 2, pool.context[rows]
        level.group_key, level.prompt_len = slots.group_key, slots.prompt_len
        config = replace(self.config, max_depth=1)
        hits = torch.zeros(len(rows), MAX_CHILDREN, dtype=torch.float64)
        for k in range(KEYS):
            # key 0 is the one of the sample itself
            keys = slots.key + 0x9E3779B97F * k
            level.key = keys[at]
            decided = self._ops.verify_all(self.logits[-1], pool, replace(slots, key=keys))
            pad = len(rows) * (1 + MAX_CHILDREN)
            drafted = self._ops.draft_tree(self.table, level, pad, config)
            first, count = drafted.slot_start[:, None], drafted.slot_nodes[:, None]
            offset = torch.arange(1, MAX_CHILDREN + 1)
            drafts = drafted.token[(first + offset).clamp(max=pad - 1).long()]
            drafts = torch.where(offset < count, drafts, -1)
            hits += (drafts == decided.sample[rows][:, None]).cumsum(1)
        return hits / KEYS


def record(engine, prompts: list, samples: int, tokens: int, options: dict) -> Pairs:
    """Record the positions of `samples` answers to each of `prompts`, all in flight together."""
    recorder, seen = [], []

    def make(ops, device):
        recorder.append(Recorder(ops, device, seen))
        return recorder[0]

    right = engine.decoder.logits

    def logits(hidden):
        seen[:] = [right(hidden)]
        return seen[0]

    # budget=0, no drafts: every position is a root, so none is left out
    engine.decoder.logits = logits
    try:
        csd.generate(
            engine,
            prompts,
            num_samples=samples,
            max_new_tokens=tokens,
            seed=0,
            drafter=make,
            budget=0,
            **options,
        )
    finally:
        engine.decoder.logits = right
    drafted = torch.stack(recorder[0].distributions)
    hits = torch.stack(recorder[0].hits)
    return Pairs(drafted[:, 0], drafted[:, 1], hits, recorder[0].positions)


def flat(pairs: int, vocab: int, generator) -> Pairs:
    """Pairs of independent distributions with uniform random weights, unlike a language model's."""
    q, p = (torch.rand(pairs, vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    return Pairs(q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True), None, pairs)
