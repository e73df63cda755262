"""Rows that a grammar changes: one matcher a sample, moved along its tree and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from csd.engine.grammar import GRAMMARS, matcher_of
from csd.engine.requests import Request
from csd.engine.slot_edits import Refill
from csd.state.pool import Pool
from csd.state.slots import Slots


class Grammars:
    """The matchers of the samples in flight, by slot. vocab: of the model's logits."""

    def __init__(self, tokenizer: Any, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._matchers: dict[int, Any] = {}
        self._read: dict[int, int] = {}  # tokens of the sample that each has read
        self._ends: dict[int, tuple[int, ...]] = {}
        self._fresh: dict[tuple, Any] = {}  # matchers at the begin, by grammar

    def fill(self, refills: Sequence[Refill]) -> None:
        """Slots get the grammars of the samples that `refills` put there."""
        for r in refills:
            params = r.request.params
            key = tuple(getattr(params, name) for name in GRAMMARS)
            if key not in self._fresh:
                self._fresh[key] = matcher_of(params, self._tokenizer, self._vocab)
            fresh = self._fresh[key]
            self._matchers[r.slot] = None if fresh is None else fresh.deep_copy()
            self._read[r.slot], self._ends[r.slot] = 0, params.end_ids

    def banned(self, pool: Pool, slots: Slots) -> torch.Tensor:
        """[M, V] bool, what grammars do not allow behind each row's prefix.

        Nothing of rows behind a banned token or an end token: no sample gets there.
        """
        token, children = _children(pool)
        bits = np.full((pool.rows, (self._vocab + 7) // 8), 255, np.uint8)
        start, nodes = pool.slot_start.tolist(), pool.slot_nodes.tolist()
        tokens, generated = slots.tokens, slots.generated.tolist()
        for s, matcher in self._matchers.items():
            if matcher is None or not nodes[s]:
                continue
            new = tokens[s, self._read[s] : generated[s]].tolist()
            self._read[s] = generated[s]
            # a sample's own tokens are allowed; behind its end there are no rows
            matcher.consume_tokens(new)
            self._walk(start[s], matcher, s, token, children, bits)
        allowed = np.unpackbits(bits, axis=1, bitorder="little", count=self._vocab)
        return torch.from_numpy(allowed == 0).to(pool.token.device)

    def _walk(
        self, row: int, matcher: Any, s: int, token: list[int], children: list[list[int]],
        bits: np.ndarray,
    ) -> None:  # fmt: skip
        """The bits of a row and of those below it."""
        mine = bits[row]
        found = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        mine[:] = 0
        mine[: len(found)] = found[: len(mine)]
        accepts = matcher.is_accepting()
        for end in self._ends[s]:
            bit = np.uint8(1 << end % 8)
            mine[end // 8] = mine[end // 8] | bit if accepts else mine[end // 8] & ~bit
        for child in children[row]:
            t = token[child]
            allowed = mine[t // 8] >> (t % 8) & 1 and t not in self._ends[s]
            if allowed and matcher.consume_token(t):
                self._walk(child, matcher, s, token, children, bits)
                matcher.rollback(1)


def _children(pool: Pool) -> tuple[list[int], list[list[int]]]:
    """Tokens and children of a pool's rows."""
    token, parent = torch.stack([pool.token, pool.parent]).tolist()
    children: list[list[int]] = [[] for _ in token]
    for row, up in enumerate(parent):
        if up >= 0:
            children[up].append(row)
    return token, children


def asks_grammar(requests: Sequence[Request]) -> bool:
    """Whether any sample has one."""
    return any(getattr(r.params, name) is not None for r in requests for name in GRAMMARS)
