"""REST (arXiv 2311.08252): continuations of the longest match in a fixed datastore, as a tree.

The datastore is a text of tokens with a suffix array. Continuations of the longest matching end of
the sample form a trie; the nodes with the most continuations through them are drafted.
"""

import warnings
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from csd.graph.host_tree import HostTree
from csd.research.baselines.host_drafter import HostDrafter
from csd.state.kv_cache import KVCache
from csd.state.pool import MAX_DEPTH, SIBLING
from csd.utils.check import Token
from csd.utils.files import check_regular, read_lines

# separator of documents; number of tokens by which suffixes are sorted
_END, _SORTED = -1, 32


class TraceTexts(TypedDict):
    """Fields of a trace file's line that a datastore reads."""

    samples: list[list[Token]]


class Datastore:
    """Documents end to end, and the sorted order of their suffixes."""

    def __init__(self, documents: list[list[int]]):
        self.tokens = [t for d in documents for t in (*d, _END)] + [_END] * _SORTED
        self.order = _suffix_order(np.array(self.tokens, np.int64)).tolist()

    @classmethod
    def load(cls, path: str | Path) -> "Datastore":
        """Read a `.npy` file of tokens, -1 between documents, or the samples of a trace file.

        Raises ValueError, naming the file, for any other file.
        """
        path = Path(path)
        if path.suffix == ".npy":
            check_regular(path)
            tokens = _array(path)
            ends = np.flatnonzero(tokens == _END)
            return cls([part[part != _END].tolist() for part in np.split(tokens, ends)])
        return cls([text for _, row in read_lines(path, TraceTexts) for text in row["samples"]])

    def find(self, query: list[int], longest: int) -> list[int]:
        """Positions after the matches of the longest suffix of `query` up to `longest` tokens."""
        places: list[int] = []
        for n in range(1, min(longest, len(query)) + 1):
            end = query[-n:]

            def key(position: int, n: int = n) -> list[int]:
                return self.tokens[position : position + n]

            low = bisect_left(self.order, end, key=key)
            high = bisect_right(self.order, end, lo=low, key=key)
            if low == high:
                break
            places = [offset + n for offset in self.order[low:high]]
        return places


def _array(path: Path) -> np.ndarray:
    try:
        # a header may state more data than the file has: a memory map allocates nothing
        with warnings.catch_warnings():
            # warnings about headers of old versions
            warnings.simplefilter("ignore")
            tokens = np.load(path, mmap_mode="r")
    except OSError:
        raise
    # a header is parsed as Python, which may raise any exception
    except Exception as error:
        raise ValueError(f"{path} is not a .npy file of tokens: {error}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold a 1-D array of integers")
    if tokens.size and not (tokens.min() >= _END and tokens.max() < 2**31):
        raise ValueError(f"{path} must hold token ids, and -1 between documents")
    return tokens.astype(np.int64)


def _suffix_order(tokens: np.ndarray) -> np.ndarray:
    """Indices of suffixes, sorted by their first _SORTED tokens, by doubling."""
    rank = np.unique(tokens, return_inverse=True)[1]
    width = 1
    while width < _SORTED:
        after = np.concatenate([rank[width:], np.full(width, -1)])
        rank = np.unique(rank * (rank.size + 1) + after + 1, return_inverse=True)[1]
        width *= 2
    return rank.argsort(kind="stable")


class Rest(HostDrafter):
    """datastore: one or its path. longest: tokens of a match. max_places: continuations read."""

    def __init__(
        self, datastore: Datastore | str | Path, longest: int = 16, max_places: int = 1000
    ):
        super().__init__()
        if not isinstance(datastore, Datastore):
            datastore = Datastore.load(datastore)
        self.datastore, self.longest, self.max_places = datastore, longest, max_places

    def attach(self, decoder: Any, cache: KVCache) -> None:
        vocab = decoder.config.vocab
        largest = max(self.datastore.tokens, default=0)
        if largest >= vocab:
            raise ValueError(
                f"the datastore has token id {largest}, outside the model's vocabulary of {vocab}"
            )

    def open(self, prompt: list[int]) -> tuple[list[int], dict[int, list[int]]]:
        return prompt, {}

    def extend(self, group: Any, sample: int, tokens: list[int], probs: list[float]) -> None:
        prompt, texts = group
        texts.setdefault(sample, list(prompt)).extend(tokens)

    def draft(self, group: Any, sample: int, tree: HostTree) -> None:
        prompt, texts = group
        text = texts.get(sample, prompt)
        places = self.datastore.find(text[-self.longest :], self.longest)[: self.max_places]
        grow(tree, [self.datastore.tokens[p : p + MAX_DEPTH] for p in places], SIBLING)


def grow(tree: HostTree, texts: list[list[int]], source: int) -> None:
    """Fill `tree` with the nodes of the trie of `texts` through which the most texts go."""
    waiting = [(-1, texts)]
    total = max(len(texts), 1)
    ready: list[tuple[float, int, int, list]] = []
    while not tree.full:
        for parent, group in waiting:
            children: dict[int, list] = {}
            for text in group:
                if text and text[0] != _END:
                    children.setdefault(text[0], []).append(text[1:])
            ready += [(len(c) / total, parent, t, c) for t, c in children.items()]
        waiting = []
        if not ready:
            return
        best = max(range(len(ready)), key=lambda i: ready[i][0])
        share, parent, token, rest = ready.pop(best)
        node = tree.add(parent, token, share, source)
        if node >= 0:
            waiting = [(node, rest)]
