"""Teacher forcing: steps that commit recorded tokens, as one chain per slot.

A step runs like one with drafts, so in an exact engine a token's log-probabilities have the same
bits as when it is sampled. Texts that begin alike share rows, as samples do.
"""

from collections.abc import Mapping
from typing import Any

import torch

from csd.graph.host_tree import HostTree, pool_of_trees
from csd.kernels.ops import Ops
from csd.state.pool import MAX_DEPTH, ROOT, Pool
from csd.state.slots import Slots
from csd.state.verdict import LENGTH, RUNNING, Verdict, empty_verdict


class TeacherForcing:
    """Proposes and accepts recorded tokens.

    tokens: by a sample's noise key and index. rows: most per step.
    """

    verifies_any_pool = True

    def __init__(self, tokens: Mapping[tuple[int, int], list[int]], ops: Ops, rows: int):
        self._tokens, self._ops, self._rows = tokens, ops, rows

    def propose(self, slots: Slots, live_count: int, nodes: int, budget: Any) -> Pool:
        """Chain each live slot's next tokens but the last to its root, as far as rows allow."""
        depth = min(MAX_DEPTH, self._rows // live_count - 1)
        trees = {}
        for s, left in self._left(slots).items():
            trees[s] = HostTree(nodes=depth, depth=depth)
            trees[s].chain(left[:-1][:depth], ROOT)
        rows = live_count + sum(len(tree.token) for tree in trees.values())
        return pool_of_trees(trees, slots, rows)

    def verify(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        """Accept the rows of recorded tokens, with the tokens that follow as samples.

        Where no token is left, the recorded one has log-probability -inf: a given token may lead to
        where no sample comes.
        """
        left = self._left(slots)
        rows, follows = self._paths(pool, left)
        row = torch.tensor(rows, device=logits.device)
        wide = torch.promote_types(logits.dtype, torch.float32)
        out = empty_verdict(pool.rows, slots.count, logits.device, wide)
        out.sample.zero_()
        out.sample[row] = torch.tensor(follows, dtype=out.sample.dtype, device=logits.device)
        out.top_token.fill_(-1)
        out.top_prob.zero_()
        out.bad.fill_(False)
        values = self._ops.token_logprobs(logits, pool, slots, row, out.sample[row].long())
        for of_rows, found in (
            (out.logprob, values.logprob),
            (out.raw_logprob, values.raw_logprob),
        ):
            of_rows.zero_()
            of_rows[row] = found
        s = pool.slot[row].long()
        out.bad[s[values.bad[row]]] = True
        out.accept_row.fill_(-1)
        out.accept_row[s, pool.depth[row].long()] = row.int()
        out.accept_count.zero_().index_add_(0, s, torch.ones_like(row, dtype=torch.int32))
        remaining = [len(left.get(s, [])) for s in range(slots.count)]
        ended = torch.tensor(remaining, device=logits.device) == out.accept_count
        out.finish.copy_(torch.where(ended & (out.accept_count > 0), LENGTH, RUNNING))
        return out

    def _paths(self, pool: Pool, left: dict[int, list[int]]) -> tuple[list[int], list[int]]:
        """Rows of each slot's recorded tokens, root first, and the token that follows each.

        A slot may have nodes of other slots' texts (`csd/kernels/texts`).
        """
        follows: dict[int, int] = {}
        fields = (pool.slot, pool.parent, pool.token, pool.depth)
        for row, (s, above, token, depth) in enumerate(
            zip(*(x.tolist() for x in fields), strict=True)
        ):
            rest = left[s]
            if depth < len(rest) and (above < 0 or follows.get(above) == token):
                follows[row] = rest[depth]
        return [*follows], [*follows.values()]

    def _left(self, slots: Slots) -> dict[int, list[int]]:
        """Tokens of each live slot that are not committed yet."""
        listed = zip(
            slots.live.tolist(),
            slots.key.tolist(),
            slots.sample.tolist(),
            slots.generated.tolist(),
            strict=True,
        )
        return {
            s: self._tokens[key, sample][generated:]
            for s, (live, key, sample, generated) in enumerate(listed)
            if live
        }
