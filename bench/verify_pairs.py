"""Pairs of a real model's target and its graph's proposal, for `bench/verify.py`."""

from dataclasses import dataclass

import torch

import csd
from bench.cpu import PROBLEMS
from csd.graph.consensus import ConsensusGraph
from csd.graph.sampled_tree import successors
from csd.pool import MAX_CHILDREN
from csd.verify.target import processed

SETTINGS = {
    "T=0.6": dict(temperature=0.6),
    "T=0.7": dict(temperature=0.7),
    "T=1.0": dict(temperature=1.0),
    "T=1.0, top-p 0.95": dict(temperature=1.0, top_p=0.95),
}


@dataclass(slots=True)
class Pairs:
    """n positions where the graph had a proposal.

    A proposal lives on the successors a context keeps, so all other tokens are one atom, the last:
    no draft can be one of them, and every scheme treats them alike.
    """

    target: torch.Tensor  # [n, W + 1] float64
    proposal: torch.Tensor  # [n, W + 1] float64, normalised over the kept successors
    blend: torch.Tensor | None  # [n, W + 1] float64, as the graph has it, sum below 1
    positions: int  # of all samples


class Recorder(ConsensusGraph):
    """A consensus graph that notes what it would have proposed, and what the target was."""

    def __init__(self, ops, device, logits: list):
        super().__init__(ops, device)
        self.logits, self.rows, self.positions = logits, [], 0

    def insert(self, pool, slots, verdict) -> None:
        rows = (pool.slot >= 0).nonzero()[:, 0]
        laws = processed(self.logits[-1], rows, pool, slots).double()
        self.positions += len(rows)
        s = pool.slot[rows].tolist()
        found = successors(self, self._ops.draft_tree, slots, s, pool.context[rows].tolist())
        for law, kept in zip(laws, found, strict=True):
            if kept.token:
                row = torch.zeros(2, MAX_CHILDREN + 1, dtype=torch.float64)
                w = len(kept.token)
                row[0, :w], row[1, :w] = law[kept.token], torch.tensor(kept.probability)
                row[0, -1] = 1 - row[0, :-1].sum()
                self.rows.append(row)
        super().insert(pool, slots, verdict)


def record(engine, prompts: int, samples: int, tokens: int, options: dict) -> Pairs:
    """Positions of `samples` answers to each of `prompts` problems, all in flight together."""
    recorder, seen = [], []

    def make(ops, device):
        recorder.append(Recorder(ops, device, seen))
        return recorder[0]

    right = engine.decoder.logits

    def logits(hidden):
        seen[:] = [right(hidden)]
        return seen[0]

    chats = [[{"role": "user", "content": p}] for p in PROBLEMS[:prompts]]
    # no drafts: every position is a root, and none is left out
    engine.decoder.logits = logits
    try:
        csd.generate(
            engine, chats, num_samples=samples, max_new_tokens=tokens, seed=0, drafter=make,
            budget=0, **options,
        )  # fmt: skip
    finally:
        engine.decoder.logits = right
    found = torch.stack(recorder[0].rows)
    target, blend = found[:, 0].clamp(min=0), found[:, 1]
    return Pairs(target, blend / blend.sum(-1, keepdim=True), blend, recorder[0].positions)


def flat(pairs: int, vocab: int, generator) -> Pairs:
    """Unrelated laws of uniform random weights: what a language model's are not."""
    q, p = (torch.rand(pairs, vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    return Pairs(q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True), None, pairs)
