"""Pages of prompts that later prompts with the same beginning use, and which of them are evicted.

A prompt is reused in units: runs of tokens whose keys and values are computed from the text before
them and within them alone, so that they have the bits of a prompt that is read whole. A unit is
found by a digest of all tokens up to its end and of a scope; prompts of two scopes share nothing.
A unit of a model with recurrent layers has the states after its last token.

The pages of a unit have an owner as long as a prompt in flight uses them. Without one they are
idle: they count as free, and are evicted when others need their memory, the least recently used
unit first, and of units used equally recently the one that ends latest.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple


class PageAllocator:
    """Allocates pages, if possible adjacent ones, since a run of pages can be read as one piece.

    Its length is the number of pages that can be taken: free ones, and idle ones of the index.
    """

    def __init__(self, pages: int):
        self._free = list(range(pages))
        self._owners = [0] * pages
        self.index: PrefixIndex | None = None  # units that are kept without an owner

    def __len__(self) -> int:
        return len(self._free) + (0 if self.index is None else self.index.idle_pages)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages: the first run of adjacent free ones that is long enough, if any.

        Evicts units of the index if too few pages are free.
        """
        if count == 0:
            return []
        if count > len(self):
            raise MemoryError(f"{count} pages were requested, but only {len(self)} are free")
        while count > len(self._free):
            assert self.index is not None
            self._set_free(self.index.evict())
        # a run's last page is count - 1 after its first
        places = range(len(self._free) - count + 1)
        runs = (i for i in places if self._free[i + count - 1] - self._free[i] == count - 1)
        first = next(runs, 0)
        taken = self._free[first : first + count]
        del self._free[first : first + count]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to pages of the index."""
        for page in pages:
            self._owners[page] += 1
        if self.index is not None:
            self.index.use(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove an owner of each page; those without any become idle or free."""
        for page in pages:
            self._owners[page] -= 1
        unowned = [page for page in pages if not self._owners[page]]
        if self.index is not None:
            unowned = self.index.let_go(unowned)
        self._set_free(unowned)

    def keep(self, digest: bytes, pages: Sequence[int], states: Any = None) -> None:
        """Keep pages that have an owner as a unit of the index, in the place of an idle unit if
        it is full; if all units of a full index have owners, these pages are not kept."""
        assert self.index is not None
        if self.index.full:
            if not self.index.idle_pages:
                return
            self._set_free(self.index.evict())
        self.index.add(digest, pages, states)

    def give_back_all(self) -> None:
        """Remove all owners."""
        self._owners = [min(owners, 1) for owners in self._owners]
        self.give_back([page for page, owners in enumerate(self._owners) if owners])

    def forget_all(self) -> None:
        """Empty the index; its idle pages become free."""
        if self.index is not None:
            self._set_free(self.index.clear())

    def _set_free(self, pages: Sequence[int]) -> None:
        if pages:
            self._free = sorted([*self._free, *pages])


class Unit(NamedTuple):
    """Consecutive pages of a prompt that are found together."""

    pages: tuple[int, ...]
    states: Any  # memory of recurrent layers after its last token; None without such layers


class PrefixIndex:
    """Units by digest, with the order of eviction.

    tokens, pages: of a unit. limit: largest number of units; None: as many as there are pages.
    key: identity of the weights and of everything else, besides the tokens, that keys and values
        depend on.
    """

    def __init__(self, tokens: int, pages: int, limit: int | None = None):
        self.tokens, self.pages, self.limit = tokens, pages, limit
        self.key: Hashable = None
        self._units: dict[bytes, Unit] = {}
        self._of: dict[int, bytes] = {}  # digest of each page's unit
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._units)

    @property
    def full(self) -> bool:
        return self.limit is not None and len(self) >= self.limit

    @property
    def idle_pages(self) -> int:
        """Number of kept pages without an owner."""
        return len(self._idle) * self.pages

    def digests(self, scope: str, tokens: Sequence[int]) -> list[bytes]:
        """Digests of the text up to the end of each whole unit of `tokens`, within a scope."""
        digests, last = [], blake2b(scope.encode(), digest_size=32).digest()
        for begin in range(0, len(tokens) - self.tokens + 1, self.tokens):
            unit = array("q", tokens[begin : begin + self.tokens]).tobytes()
            last = blake2b(last + unit, digest_size=32).digest()
            digests.append(last)
        return digests

    def find(self, digests: Sequence[bytes]) -> list[Unit]:
        """The units of the longest beginning whose units are all here."""
        return [self._units[digest] for digest in takewhile(self._units.__contains__, digests)]

    def add(self, digest: bytes, pages: Sequence[int], states: Any = None) -> None:
        """Keep pages that have an owner as a unit; if there is one of this digest, it stays."""
        if digest not in self._units:
            self._units[digest] = Unit(tuple(pages), states)
            self._of.update(dict.fromkeys(pages, digest))

    def idle(self) -> list[tuple[bytes, Unit]]:
        """Units without an owner, the least recently used one first."""
        return [(digest, self._units[digest]) for digest in self._idle]

    def use(self, pages: Sequence[int]) -> None:
        """Protect the units of these pages from eviction: they have an owner."""
        for page in pages:
            if page in self._of:
                self._idle.pop(self._of[page], None)

    def let_go(self, pages: Sequence[int]) -> list[int]:
        """Let the units of pages without an owner be evicted; returns the pages of no unit.

        pages: in the order of their text.
        """
        ended = dict.fromkeys(self._of[page] for page in pages if page in self._of)
        # a text's end is evicted before its beginning
        for digest in reversed(ended):
            self._idle[digest] = None
            self._idle.move_to_end(digest)
        return [page for page in pages if page not in self._of]

    def evict(self) -> tuple[int, ...]:
        """Remove the idle unit that was used longest ago; returns its pages."""
        digest, _ = self._idle.popitem(last=False)
        unit = self._units.pop(digest)
        for page in unit.pages:
            del self._of[page]
        return unit.pages

    def clear(self) -> list[int]:
        """Remove all units; returns the pages of those that were idle."""
        idle = [page for digest in self._idle for page in self._units[digest].pages]
        for held in (self._units, self._of, self._idle):
            held.clear()
        return idle
