"""Drafter of "Speculative Decoding for Multi-Sample Inference" (arXiv 2503.05330).

With s the last k tokens of a sample, the continuation of a window s' of k tokens in another
sample's text is a candidate if the edit distance of s and s' is at most eps: exact and inexact
matches together. The candidates form a graph in layers: equal tokens of one layer are one node, and
the edge from u to v has weight

    w(u, v) = alpha P(v | u) + (1 - alpha) Freq(u -> v)

with Freq the share of the candidates through u in one layer that continue with v, and P the mean
probability with which the target drew v there. The draft is the chain of heaviest edges; a tree
draft has the paths with the largest products of weights.

The paper does not define P or which matches count. Here P is the target's probability when the
other sample drew v, and every match counts. A window ends where the query ends: their last tokens
are equal or substituted, so a continuation of the window fits the query. With the query's last
token deleted, a sibling at the same place would draft it once more.

`shrink` is an addition: only the strictest matches count, and fewer tokens are looked up if k have
no match.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from csd.graph.host_tree import HostTree
from csd.kernels.draft.paper.suffix_match import match_ends
from csd.research.baselines.host_drafter import HostDrafter
from csd.state.pool import MAX_CHILDREN, MAX_DEPTH, SIBLING

# after each text, so that no match and no candidate reaches into the next text
_GAP = [-1] * (MAX_DEPTH + 1)


@dataclass(slots=True)
class TextGroup:
    """Texts of the samples, each after the prompt's end."""

    prompt: list[int]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    probs: dict[int, list[float]] = field(default_factory=dict)
    joined: tuple | None = None

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token, probability and sample at each index of all texts end to end; token -1 in gaps."""
        if self.joined is None:
            texts = [t for text in self.tokens.values() for t in (*text, *_GAP)]
            chances = [p for text in self.probs.values() for p in (*text, *_GAP)]
            lengths = [len(text) + len(_GAP) for text in self.tokens.values()]
            owner = np.repeat(np.array(list(self.tokens), np.int64), lengths)
            self.joined = np.array(texts, np.int64), np.array(chances), owner
        return self.joined


class Paper(HostDrafter):
    """k: tokens of the query; edits: eps, most edits of a match; alpha: factor of P in w.

    shrink: whether exact matches are tried before inexact ones, and fewer tokens if k have no
    match; edits are then allowed in a match of at least 2 * edits + 2 tokens.
    least: smallest weight of an edge that is followed. siblings: number of other samples that are
    searched, those of the lowest indices; None for all.
    """

    def __init__(
        self,
        tree: bool = False,
        k: int = 4,
        edits: int = 1,
        alpha: float = 0.5,
        shrink: bool = False,
        least: float = 0.0,
        siblings: int | None = None,
    ):
        super().__init__()
        self.tree, self.k, self.edits, self.alpha = tree, k, edits, alpha
        self.shrink, self.least, self.siblings = shrink, least, siblings

    def open(self, prompt: list[int]) -> TextGroup:
        return TextGroup(prompt[-self.k :])

    def extend(self, group: TextGroup, sample: int, tokens: list[int], probs: list[float]) -> None:
        if sample not in group.tokens:
            group.tokens[sample] = list(group.prompt)
            group.probs[sample] = [1.0] * len(group.prompt)
        group.tokens[sample] += tokens
        group.probs[sample] += probs
        group.joined = None

    def draft(self, group: TextGroup, sample: int, tree: HostTree) -> None:
        own = group.tokens.get(sample, group.prompt)
        text, chance, owner = group.flat()
        # a match needs a continuation of another sample
        usable = np.zeros(text.size, bool)
        usable[:-1] = (text[:-1] >= 0) & (text[1:] >= 0) & (owner[:-1] != sample)
        if self.siblings is not None:
            others = sorted(set(group.tokens) - {sample})[: self.siblings]
            usable &= np.isin(owner, others)
        for k, edits in self._lookups(len(own)):
            ends = (match_ends(text, own[-k:], edits) & usable).nonzero()[0]
            if ends.size:
                index = ends[:, None] + np.arange(1, min(tree.depth, tree.nodes) + 1)
                inside = np.logical_and.accumulate(text[index] >= 0, 1)
                self._extract(np.where(inside, text[index], -1), chance[index], tree)
                return

    def _lookups(self, length: int) -> list[tuple[int, int]]:
        """Sizes of the query and edits, in order of lookup; the first with a match counts."""
        if not self.shrink:
            return [(self.k, self.edits)] if length >= self.k else []
        return [
            (k, edits)
            for k in range(min(self.k, length), 0, -1)
            for edits in range(min(self.edits, max(k - 2, 0) // 2) + 1)
        ]

    def _extract(self, candidate: np.ndarray, chance: np.ndarray, tree: HostTree) -> None:
        """Fill `tree` from candidates [n, depth], -1 after their ends; chance: [n, depth]."""
        layers = {}

        def edges(layer: int, token: int) -> list[tuple[float, int]]:
            """Edges from `token` to the next layer, heaviest first."""
            if (layer, token) not in layers:
                chosen = candidate[:, layer] == token if layer >= 0 else slice(None)
                after, p = candidate[chosen, layer + 1], chance[chosen, layer + 1]
                after, p = after[after >= 0], p[after >= 0]
                tokens, inverse = np.unique(after, return_inverse=True)
                count = np.bincount(inverse)
                weight = self.alpha * np.bincount(inverse, p) / count
                weight += (1 - self.alpha) * count / max(after.size, 1)
                order = np.lexsort((tokens, -weight))[:MAX_CHILDREN]
                layers[layer, token] = [
                    (float(weight[i]), int(tokens[i])) for i in order if weight[i] >= self.least
                ]
            return layers[layer, token]

        if not self.tree:
            parent, path, token = -1, 1.0, -1
            for layer in range(-1, candidate.shape[1] - 1):
                heaviest = edges(layer, token)
                if not heaviest or tree.full:
                    return
                weight, token = heaviest[0]
                path *= weight
                parent = tree.add(parent, token, path, SIBLING)
            return
        heap = [(-w, -1, t) for w, t in edges(-1, -1)]
        heapq.heapify(heap)
        while heap and not tree.full:
            cost, parent, token = heapq.heappop(heap)
            node = tree.add(parent, token, -cost, SIBLING)
            layer = tree.level[node] - 1 if node >= 0 else tree.depth
            if layer + 1 < candidate.shape[1]:
                for w, t in edges(layer, token):
                    heapq.heappush(heap, (cost * w, node, t))
