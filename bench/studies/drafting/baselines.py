"""Drafters that only benchmarks use: an n-gram trie as in servers, a datastore in memory."""

import heapq
from collections import deque

from csd.graph.host_tree import HostTree
from csd.research.baselines.host_drafter import HostDrafter
from csd.research.baselines.multi_sample_paper import Paper
from csd.research.baselines.rest import Datastore, Rest
from csd.state.pool import SIBLING

RIVALS = ("rest", "trie", "trie-frequency", "trie-prompt", "paper-exact", "paper-shrinking-fuzzy")


class Trie(HostDrafter):
    """One trie of every sample's last `depth` tokens, which are inserted after every step.

    The draft tree starts from all suffixes of the text that the trie contains, the longest first.
    Each is expanded breadth first, latest children first, with a breadth that falls with the depth;
    or, with `frequency`, best first.
    """

    def __init__(self, depth=18, breadth=(1, 10), frequency=False, prompt=False):
        super().__init__()
        self.depth, self.breadth = depth, breadth
        self.frequency, self.prompt = frequency, prompt

    def open(self, prompt):
        root = _Node()
        if self.prompt:
            for start in range(len(prompt)):
                root.enter(prompt[start : start + self.depth])
        return prompt, root, {}

    def extend(self, group, sample, tokens, probabilities):
        prompt, root, texts = group
        text = texts.setdefault(sample, list(prompt))
        had = len(text)
        text += tokens
        first = max(0 if self.prompt else len(prompt), len(text) - self.depth, 0)
        for start in range(min(first, had), len(text)):
            if start >= first:
                root.enter(text[start : start + self.depth])

    def draft(self, group, sample, tree: HostTree):
        prompt, root, texts = group
        text = texts.get(sample, prompt)
        for size in range(min(self.depth, len(text)), 0, -1):
            node = root.find(text[-size:])
            if node is not None and node.children:
                if self.frequency:
                    self._best_first(node, tree)
                else:
                    self._breadth_first(node, size, tree)
            if tree.full:
                return

    def _breadth_first(self, node, size, tree):
        low, high = self.breadth
        fall = (high - low) / (self.depth - 1)
        queue = deque([(-1, (self.depth - 1 - size) * fall + low, node)])
        while queue and not tree.full:
            parent, breadth, node = queue.popleft()
            for token, child in list(reversed(node.children.items()))[: max(1, int(breadth))]:
                # later nodes have a lower score, never above that of their parent
                place = tree.add(parent, token, 0.9 ** len(tree.token), SIBLING)
                if place >= 0:
                    queue.append((place, breadth - fall, child))

    def _best_first(self, node, tree):
        heap, count = [], 0

        def push(parent, node, chance):
            nonlocal count
            top = sorted(node.children.items(), key=lambda c: -c[1].count)[: self.breadth[1]]
            total = sum(child.count for _, child in top)
            for token, child in top:
                count += 1
                heapq.heappush(heap, (-chance * child.count / total, count, parent, token, child))

        push(-1, node, 1.0)
        while heap and not tree.full:
            chance, _, parent, token, child = heapq.heappop(heap)
            place = tree.add(parent, token, 0.9 ** len(tree.token), SIBLING)
            if place >= 0:
                push(place, child, -chance)


class _Node:
    __slots__ = ("children", "count")

    def __init__(self):
        self.children: dict[int, _Node] = {}  # in order of insertion
        self.count = 0

    def enter(self, tokens) -> None:
        node = self
        for token in tokens:
            child = node.children.pop(token, None) or _Node()
            node.children[token] = child
            child.count += 1
            node = child

    def find(self, tokens):
        node = self
        for token in tokens:
            node = node.children.get(token)
            if node is None:
                return None
        return node


def make_rival(name: str, others: list):
    """Make a drafter of RIVALS. others: traces of other problems, for those with a datastore."""
    if name == "rest":
        return Rest(Datastore([text for trace in others for text in trace.samples]))
    if name == "paper-exact":
        return Paper(edits=0)
    if name == "paper-shrinking-fuzzy":
        return Paper(k=6, edits=1, shrink=True)
    return Trie(frequency=name == "trie-frequency", prompt=name == "trie-prompt")
