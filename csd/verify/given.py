"""Steps over tokens that are given: each slot's next ones as a chain, all of which are kept.

A step runs as one that drafts does, so a token's log-probability has the bits that sampling it
gives where an engine is exact.
"""

from collections.abc import Mapping
from typing import Any

import torch

from csd.graph.host_tree import Tree, pool_of
from csd.kernels.change_rows import blocks, own_chance
from csd.kernels.verify.reference_rows import log_sum_ref
from csd.state.pool import MAX_DEPTH, ROOT, Pool
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, Verdict, empty_verdict
from csd.verify.target import processed


class GivenTokens:
    """In the place of a sampler; tokens: by a sample's noise key and index. rows: of a step."""

    def __init__(self, tokens: Mapping[tuple[int, int], list[int]], rows: int):
        self._tokens, self.rows = tokens, rows

    def propose(self, slots: Slots, live: int, nodes: int, budget: Any) -> Pool:
        """Each live slot's root and its next tokens but the last, as far as rows go."""
        depth = min(MAX_DEPTH, self.rows // live - 1)
        trees = {}
        for s, left in self._left(slots).items():
            trees[s] = Tree(nodes=depth, depth=depth)
            trees[s].chain(left[:-1][:depth], ROOT)
        return pool_of(trees, slots, live + sum(len(tree.token) for tree in trees.values()))

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """All rows are kept, with the given tokens in the place of samples."""
        left = self._left(slots)
        slot, depth = pool.slot.tolist(), pool.depth.tolist()
        device = logits.device
        token = torch.tensor(
            [left[s][d] for s, d in zip(slot, depth, strict=True)], device=device
        )
        out = empty_verdict(
            pool.rows, slots.count, device, torch.promote_types(logits.dtype, torch.float32)
        )
        out.sample.copy_(token)
        out.top_token.fill_(-1), out.top_prob.zero_(), out.accept_row.fill_(-1)
        out.accept_count.copy_(pool.slot_nodes), out.bad.fill_(False), out.finish.fill_(RUNNING)
        for rows in blocks(pool.rows):
            self._measure(rows, logits, token, pool, slots, out)
        for row, (s, d) in enumerate(zip(slot, depth, strict=True)):
            out.accept_row[s, d] = row
        for s, tokens in left.items():
            if len(tokens) == int(pool.slot_nodes[s]):
                out.finish[s] = LENGTH
        return out

    def _measure(
        self, rows: slice, logits: torch.Tensor, token: torch.Tensor, pool: Pool, slots: Slots,
        out: Verdict,
    ) -> None:  # fmt: skip
        part, s = logits[rows], pool.slot[rows].long()
        out.raw_logprob[rows] = own_chance(part, token[rows])
        broken = ~log_sum_ref(part).isfinite()
        out.bad[s[broken]] = True
        at = torch.arange(pool.rows, device=s.device)[rows]
        greedy = slots.temperature[s] == 0
        if bool(greedy.all()) or _plain(slots, s):
            out.logprob[rows] = out.raw_logprob[rows]
            return
        law = processed(logits, at, pool, slots)
        chance = law.gather(1, token[rows, None])[:, 0].log()
        out.logprob[rows] = torch.where(greedy, out.raw_logprob[rows], chance)

    def _left(self, slots: Slots) -> dict[int, list[int]]:
        """The tokens that each live slot has not read yet."""
        listed = zip(
            slots.live.tolist(), slots.key.tolist(), slots.sample.tolist(),
            slots.generated.tolist(), strict=True,
        )  # fmt: skip
        return {
            s: self._tokens[key, sample][generated:]
            for s, (live, key, sample, generated) in enumerate(listed)
            if live
        }


def _plain(slots: Slots, s: torch.Tensor) -> bool:
    """Whether slots s draw from the model's own law."""
    own = (slots.temperature[s] == 1) & (slots.top_k[s] == 0) & (slots.top_p[s] == 1)
    own &= (slots.min_p[s] == 0) & (slots.penalty[s] == 1) & (slots.min_new[s] == 0)
    return bool(own.all())
