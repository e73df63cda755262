"""A set's banned sequences of several tokens, as the tree of `csd.state.logit_rules.Rules`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class WordTree:
    """A tree over all tokens of each sequence but the last, from the second-last backwards.

    Edge e leads to node e + 1, and edges ascend by their parent, then by their token. The tree has
    at most as many edges as its sequences have tokens, whatever their number and lengths.
    """

    parent: np.ndarray  # [E], node from which each edge starts
    token: np.ndarray  # [E]
    starts: np.ndarray  # [E + 1], the first of each node's `ends`
    ends: np.ndarray  # [B], last tokens of the sequences, in order of their nodes
    longest: int  # tokens of the longest sequence
    hits: int  # largest number of ends on a path from the root

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "WordTree":
        """Make the tree of sequences; those of a single token are left out."""
        words = [word for word in words if len(word) > 1]
        length = np.array([len(word) for word in words], np.int64)
        tokens = np.array([token for word in words for token in word], np.int64)
        last = np.cumsum(length) - 1
        node = np.zeros(len(words), np.int64)
        parents, edges, nodes = [], [], 0
        for depth in range(int(length.max(initial=1)) - 1):
            deeper = np.flatnonzero(length - 1 > depth)
            pairs = np.stack([node[deeper], tokens[last[deeper] - 1 - depth]])
            new, of = np.unique(pairs, axis=1, return_inverse=True)
            node[deeper] = nodes + 1 + of.reshape(-1)
            parents.append(new[0])
            edges.append(new[1])
            nodes += new.shape[1]
        order = np.argsort(node, kind="stable")
        count = np.bincount(node, minlength=nodes + 1)
        # ends on the path to each node; the nodes of a level follow those of the levels above
        total, first = count.copy(), 1
        for parent in parents:
            total[first : first + len(parent)] += total[parent]
            first += len(parent)
        return cls(
            np.concatenate([*parents, node[:0]]),
            np.concatenate([*edges, node[:0]]),
            np.cumsum(count) - count,
            tokens[last][order],
            int(length.max(initial=1)),
            int(total.max()),
        )
